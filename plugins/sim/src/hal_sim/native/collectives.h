// Collective operations of a group, put on a stream like any other work.
#pragma once
#include "group.h"
#include "stream.h"

namespace halsim {

// The numbers are Paddle's C_DataType and C_CCLReduceOp, which this header does not need.
enum class Type : uint32_t { none = 0, b8, u8, u16, u32, u64, i8, i16, i32, i64, f16, f32, f64, bf16, c64, c128 };
enum class Reduce : uint32_t { sum = 0, average, maximum, minimum, product };

size_t type_bytes(Type type);
bool can_reduce(Type type);
void reduce_into(void* into, const void* from, size_t count, Type type, Reduce how);
void divide(void* data, size_t count, Type type, uint32_t by);

struct Collective {
  Kind kind;
  const void* send;
  void* receive;
  size_t count;  // elements: of the whole buffer for broadcast and reductions, of one rank's part otherwise
  Type type;
  Reduce how = Reduce::sum;
  uint32_t root = 0;
};
Status submit_collective(Group* group, Stream* stream, const Collective& collective);

struct Transfer {
  Group* group;
  void* buffer;
  size_t bytes;
  uint32_t peer;
  bool sending;
};
// All transfers of one call make progress together, so that two ranks may both send first.
Status submit_transfers(Stream* stream, std::vector<Transfer> transfers);

}  // namespace halsim
