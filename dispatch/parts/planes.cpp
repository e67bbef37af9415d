#include "dispatch/parts/planes.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "dispatch/parts/kernel_bridge.h"

namespace qshard {
namespace {

constexpr int64_t kPlaneAlignment = 16;

int64_t grid_offset(const Layout& layout) {
  return round_up(layout.image_bytes(), kPlaneAlignment);
}

at::Tensor grid_in(const c10::Storage& codes, const Layout& layout) {
  return tensor_at(codes, at::kFloat, grid_offset(layout),
                   {layout.grid_rows(), layout.grid_cols()});
}

at::Tensor master_in(const c10::Storage& storage, const Layout& layout, at::ScalarType dtype) {
  return tensor_at(storage, dtype, 0, {layout.rows, layout.cols});
}

void check_bytes(const c10::Storage& storage, int64_t expected, const Layout& layout,
                 const char* what) {
  TORCH_CHECK(
      static_cast<int64_t>(storage.nbytes()) == expected,
      fmt::format("qshard: a storage of {} bytes does not hold the {} of a {} tensor of {} "
                  "x {}, which takes {} bytes",
                  storage.nbytes(), what, layout.format->name, layout.rows, layout.cols, expected));
}

}  // namespace

int64_t bytes_of_codes(const Layout& layout) {
  return grid_offset(layout) +
         round_up(layout.grid_numel() * static_cast<int64_t>(sizeof(float)), kPlaneAlignment);
}

int64_t bytes_of_master(const Layout& layout, at::ScalarType dtype) {
  return layout.rows * layout.cols * static_cast<int64_t>(c10::elementSize(dtype));
}

void Planes::bind_codes(const c10::Storage& codes, const Layout& layout,
                        const ReadOnlyTensor& snapshot) {
  image_ = tensor_at(codes, at::kByte, 0, {layout.rows, layout.row_bytes()});
  if (snapshot.defined()) {
    grid_ = Grid::snapshot(snapshot);
  } else if (layout.format->has_grid()) {
    grid_ = Grid::owned(grid_in(codes, layout));
  }
}

Planes Planes::none(at::ScalarType dtype, bool keeps_master, at::Device device) {
  Planes planes;
  planes.storage_ = allocate_storage(0, device, Fill::kNothing);
  planes.image_ = tensor_at(planes.storage_, at::kByte, 0, {0});
  if (keeps_master) planes.master_ = tensor_at(planes.storage_, dtype, 0, {0});
  return planes;
}

Planes Planes::allocate(const Layout& layout, at::ScalarType dtype, bool keeps_master,
                        at::Device device, Fill fill, bool pinned) {
  Planes planes;
  auto codes = allocate_storage(bytes_of_codes(layout), device, fill, pinned);
  planes.bind_codes(codes, layout, {});
  planes.bind_value(std::move(codes), layout, dtype, keeps_master, fill, pinned);
  return planes;
}

Planes Planes::allocate_with_snapshot(const ReadOnlyTensor& grid, const Layout& layout,
                                      at::ScalarType dtype, bool keeps_master, at::Device device,
                                      Fill fill) {
  Planes planes;
  auto codes = allocate_storage(bytes_of_codes(layout), device, fill);
  planes.bind_codes(codes, layout, grid);
  planes.bind_value(std::move(codes), layout, dtype, keeps_master, fill, /*pinned=*/false);
  return planes;
}

void Planes::bind_value(c10::Storage codes, const Layout& layout, at::ScalarType dtype,
                        bool keeps_master, Fill fill, bool pinned) {
  storage_ = std::move(codes);
  if (!keeps_master) return;
  storage_ = allocate_storage(bytes_of_master(layout, dtype), storage_.device(), fill, pinned);
  master_ = master_in(storage_, layout, dtype);
}

Planes Planes::around_master(c10::Storage storage, const Layout& layout, at::ScalarType dtype) {
  check_bytes(storage, bytes_of_master(layout, dtype), layout, "values");
  watch_resizes(storage);
  Planes planes;
  planes.storage_ = std::move(storage);
  planes.master_ = master_in(planes.storage_, layout, dtype);
  planes.bind_codes(
      allocate_storage(bytes_of_codes(layout), planes.storage_.device(), Fill::kNothing), layout,
      {});
  return planes;
}

Planes Planes::over_codes(c10::Storage storage, const Layout& layout) {
  check_bytes(storage, bytes_of_codes(layout), layout, "codes and scales");
  watch_resizes(storage);
  Planes planes;
  planes.storage_ = std::move(storage);
  planes.bind_codes(planes.storage_, layout, {});
  return planes;
}

Planes Planes::over(const at::Tensor& master, const at::Tensor& codes, const Layout& layout,
                    at::ScalarType dtype) {
  Planes planes = over_codes(codes.storage(), layout);
  if (!master.defined()) return planes;
  check_bytes(master.storage(), bytes_of_master(layout, dtype), layout, "values");
  planes.storage_ = master.storage();
  planes.master_ = master_in(planes.storage_, layout, dtype);
  return planes;
}

Planes Planes::over_image(const at::Tensor& bytes, Grid grid, const Layout& layout) {
  Planes planes;
  planes.replace_image(bytes, std::move(grid), layout);
  return planes;
}

void Planes::replace_image(const at::Tensor& bytes, Grid grid, const Layout& layout) {
  if (!image_.defined() || !image_.is_alias_of(bytes)) {
    image_ = bytes.view({layout.rows, layout.row_bytes()});
    storage_ = bytes.storage();
    flat_image_.reset();
  }
  grid_ = std::move(grid);
  pending_ = {};
}

at::Tensor Planes::flat_image() {
  if (!flat_image_.defined()) flat_image_ = image_.write().view(-1);
  return flat_image_;
}

bool Planes::has_code_storage(const Layout& layout) const {
  return static_cast<int64_t>(code_storage().nbytes()) == bytes_of_codes(layout) &&
         (!grid_.defined() || grid_.read().storage_impl() == code_storage().unsafeGetStorageImpl());
}

Grid& Planes::own_grid(const Layout& layout) {
  if (!grid_.is_snapshot()) return grid_;
  const ReadOnlyTensor snapshot = grid_.read();
  const bool has_room = static_cast<int64_t>(code_storage().nbytes()) == bytes_of_codes(layout);
  const at::Tensor own =
      has_room ? grid_in(code_storage(), layout) : at::empty(snapshot.sizes(), snapshot.options());
  copy_on_device(own.mutable_data_ptr(), snapshot.const_data_ptr(), snapshot.nbytes(), device());
  grid_ = Grid::owned(own);
  grid_.set_given(snapshot);
  return grid_;
}

void Planes::fill_unit_scales() {
  if (!grid_.defined() || device().is_meta()) return;
  const at::Tensor grid = grid_.write();
  if (device().is_cpu()) {
    std::fill_n(grid.mutable_data_ptr<float>(), grid.numel(), 1.f);
  } else {
    PlainGuard guard;
    grid.fill_(1.0);
  }
}

const ReadOnlyTensor& Planes::give_grid(bool is_fresh) {
  if (grid_.defined() && (is_fresh || !grid_.given().defined())) {
    PlainGuard guard;
    const at::Tensor copy = grid_.read().operand().clone();
    record_on_default_stream(copy);
    grid_.set_given(copy);
  }
  return grid_.given();
}

const c10::VariableVersion& Planes::version_counter() const {
  return (master_.defined() ? master_ : image_).impl()->version_counter();
}

void Planes::set_master_counter(const c10::VariableVersion& counter) {
  master_.impl()->set_version_counter(counter);
}

void Planes::release() { *this = Planes(); }

}  // namespace qshard
