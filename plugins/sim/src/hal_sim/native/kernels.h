// Device kernels: they run on a stream and reach memory through a Kernel, which checks and notes every access.
#pragma once
#include "memory.h"
#include "stream.h"

namespace halsim {

// One entry of a write plan. `fill` 0: copy `bytes` from the payload at offset `source`; 1, 2, 4 or 8: repeat the low
// `fill` bytes of `source` over the target.
struct Write {
  uint64_t target;
  uint64_t source;
  uint32_t bytes;
  uint32_t fill;
};

// One field of a slot table: where slot 0 begins, bytes from slot to slot, and where its bytes are in a packed record.
struct Field {
  uint64_t base;
  uint64_t stride;
  uint32_t offset;
  uint32_t bytes;
};
static_assert(sizeof(Write) == 24 && sizeof(Field) == 24, "Python packs these");

struct Scatter {
  uint64_t block, block_bytes;  // the staging block, in device or pinned memory
  uint64_t table;               // offset of the entries in it
  uint64_t count;
  uint64_t base;     // added to every target
  uint64_t payload;  // offset of the payload in the block
};

struct Spread {
  uint64_t records, record_bytes, count;
  uint64_t slots;        // one index a record
  uint32_t slot_bytes;   // 4 or 8
  uint32_t field_count;
  uint64_t fields;       // the field map, in device or pinned memory
  uint64_t slot_limit;   // an index at or beyond it is a fault
  uint64_t base;         // added to every field's base
};

constexpr int kMaxRank = 9;
struct Strided {
  uint64_t dst, src;
  uint32_t rank, item_bytes;
  int64_t dims[kMaxRank], dst_strides[kMaxRank], src_strides[kMaxRank];  // strides in bytes
};

Status launch_scatter(Stream* stream, const Scatter& scatter);
Status launch_spread(Stream* stream, const Spread& spread);
Status launch_plan(Stream* stream, const Spread& spread, const Scatter& scatter);  // the two in one launch, in this order
Status launch_strided(Stream* stream, const Strided& strided);
Status launch_fill(Stream* stream, uint64_t dst, uint64_t bytes, uint64_t pattern, uint32_t pattern_bytes);
// dst[index[i]] = rows[i], in order, so of two rows for one index the last one stays. With an `add_type` (collectives.h)
// the named rows are zeroed first and then summed up.
struct IndexRows {
  uint64_t dst, index, rows;
  uint64_t row_bytes, dst_rows, count;
  uint32_t index_bytes, add_type;
};
Status launch_index_rows(Stream* stream, const IndexRows& index_rows);

// The access of one running kernel to memory. A failed mapping is reported once and makes the rest do nothing.
class Kernel {
 public:
  explicit Kernel(const OperationRef& op) : op_(op) {}
  ~Kernel() {
    for (auto& run : runs_) flush(run);
  }
  Kernel(const Kernel&) = delete;
  Kernel& operator=(const Kernel&) = delete;

  const char* read(const char* role, uint64_t address, size_t bytes) { return map(role, address, bytes, false); }
  char* write(const char* role, uint64_t address, size_t bytes) { return map(role, address, bytes, true); }
  bool failed() const { return failed_; }
  void fail(uint64_t address, size_t bytes, const std::string& text);

 private:
  char* map(const char* role, uint64_t address, size_t bytes, bool write);
  void flush(Range& run);

  OperationRef op_;
  std::vector<BlockRef> blocks_;  // the last ones used; most kernels use few
  Range runs_[2] = {{0, 0, false}, {0, 0, true}};  // neighbouring accesses of a kind are noted as one
  bool failed_ = false;
};

void fill_bytes(char* out, size_t bytes, uint64_t pattern, uint32_t pattern_bytes);

}  // namespace halsim
