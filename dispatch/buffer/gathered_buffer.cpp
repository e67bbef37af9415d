#include "dispatch/buffer/gathered_buffer.h"

#include <fmt/format.h>

#include <utility>

#include "dispatch/parts/streams.h"

namespace qshard {

at::Tensor GatheredBuffer::begin(QuantizedBuffer& shard, Images images) {
  shard.check_is_allocated();
  shard.flush_state_.flushed().wait();
  // A replay is waited for by the stream that it runs on, or by the default one.
  if (shard.flush_state_.may_be_replayed()) wait_for_stream({}, shard.device());
  const Ptr owner = shard.original();
  owner->gather_ = {shard.snapshot_grid(), shard.generation(), images};
  if (images == Images::kAll) return shard.planes_.flat_image();
  const Layout& layout = shard.layout();
  const int64_t offset = images == Images::kRowwise ? 0 : layout.columnwise_offset();
  return shard.planes_.write_image().narrow(1, offset, layout.image_row_bytes()).reshape(-1);
}

BufferPtr GatheredBuffer::of(QuantizedBuffer& shard, const at::Tensor& bytes,
                             at::ScalarType dtype) {
  auto [grid, generation, images] = shard.end_gather();
  const Layout layout = shard.layout().with_images(images);
  // Rows without columns have no bytes to count: there are as many as all ranks hold.
  const int64_t row_bytes = layout.row_bytes();
  const int64_t rows =
      row_bytes > 0 ? bytes.numel() / row_bytes : layout.rows * ranks_of(shard.placement().group());
  TORCH_CHECK(bytes.scalar_type() == at::kByte && bytes.numel() == rows * row_bytes,
              fmt::format("qshard: gathered {} {} elements are not rows of {} bytes", bytes.numel(),
                          c10::toString(bytes.scalar_type()), row_bytes));
  TORCH_CHECK(!grid.defined() || grid.device() == bytes.device(),
              fmt::format("qshard: bytes on {} were gathered of a shard on {}",
                          bytes.device().str(), grid.device().str()));
  const Layout whole = with_run(layout, 0).holding(rows).placed(0);
  auto buffer = c10::make_intrusive<GatheredBuffer>(
      Placement(whole, Gathered{}), dtype,
      Planes::over_image(bytes.view(-1), Grid::snapshot(std::move(grid)), whole),
      shard.scaling_state());
  buffer->flush_state().join(generation);
  buffer->remembered().watched = shard.remembered().watched;
  return buffer;
}

void GatheredBuffer::regather(QuantizedBuffer& shard, const at::Tensor& bytes) {
  if (shard.gather_) {
    const Layout later = layout().with_images(shard.gather_->images);
    const Layout& of_shard = shard.layout();
    TORCH_CHECK(
        of_shard.format == later.format && of_shard.cols == later.cols &&
            of_shard.logical_rows == later.logical_rows && bytes.scalar_type() == at::kByte &&
            bytes.is_contiguous() && bytes.numel() == later.image_bytes() &&
            bytes.device() == device(),
        fmt::format("qshard: {} gathered bytes of a {} shard of {} columns are not those of "
                    "a gathered {} tensor of {} x {}",
                    bytes.numel(), of_shard.format->name, of_shard.cols, later.format->name,
                    later.rows, later.cols));
  }
  auto [grid, generation, images] = shard.end_gather();
  placement().set_images(images);
  planes_.replace_image(bytes, Grid::snapshot(std::move(grid)), layout());
  flush_state().watch().watch(planes_.memory());
  note_codes();
  // The shard may be another tensor than in the gather before, as after Module.to().
  scaling_state() = shard.scaling_state();
  remembered().watched = shard.original()->remembered().watched;
  flush_state().join(generation);
  flush_state().mark_scales_synced();
}

}  // namespace qshard
