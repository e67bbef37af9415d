// What is remembered of a buffer to save time.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "kernels/statistics/watched.h"
#include "kernels/tensors/last_input_amax.h"

namespace qshard {

/// What the mesh over which FSDP2 gathers a shard is to it. FSDP2 says it in an attribute of its
/// own, which takes too long to read at each gather.
struct MeshOfGathers {
  std::string mesh;            // c10d name of its group
  bool is_replicated = false;  // its ranks hold the same rows
};

/// The number of the groups that were found for a DTensor, `spec` the number of its spec.
struct GroupsOfSpec {
  int64_t spec = 0;  // 0: none
  int64_t groups = 0;
};

/// No state: a buffer that forgets it asks again, and nothing is saved of it.
struct Remembered {
  LastInputAmax last_input;  // what the codes of a linear's input are guessed by
  MeshOfGathers mesh_of_gathers;
  GroupsOfSpec groups_of_spec;
  std::shared_ptr<Watched> watched;  // null but where qshard.watch looks at the weight
};

}  // namespace qshard
