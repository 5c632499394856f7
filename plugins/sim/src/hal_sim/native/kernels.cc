#include "kernels.h"

#include <algorithm>
#include <cstring>

#include "collectives.h"

namespace halsim {

char* Kernel::map(const char* role, uint64_t address, size_t bytes, bool write) {
  if (failed_) return nullptr;
  BlockRef block;
  for (const auto& b : blocks_) {
    if (address < b->begin || address + bytes > b->begin + b->bytes) continue;
    block = b;
    break;
  }
  if (!block) {
    Mapped mapped = map_any(op_, role, address, bytes);
    if (!mapped || (mapped.keep->device != kPinned && mapped.keep->device != op_->device)) {
      if (mapped) fail(address, bytes, std::string(role) + " belongs to another device");
      failed_ = true;
      return nullptr;
    }
    block = mapped.keep;
    blocks_.push_back(block);
  }
  Range& run = runs_[write];
  if (run.bytes && run.begin + run.bytes == address) {
    run.bytes += bytes;
  } else {
    flush(run);
    run = {address, bytes, write};
  }
  return block->alias + (address - block->begin);
}

void Kernel::flush(Range& run) {
  if (run.bytes) note_access(op_, run.begin, run.bytes, run.write);
  run.bytes = 0;
}

void Kernel::fail(uint64_t address, size_t bytes, const std::string& text) {
  failed_ = true;
  fault(op_, ReportKind::address, address, bytes, text);
}

void fill_bytes(char* out, size_t bytes, uint64_t pattern, uint32_t pattern_bytes) {
  for (size_t at = 0; at < bytes; at += pattern_bytes) {
    std::memcpy(out + at, &pattern, std::min<size_t>(pattern_bytes, bytes - at));
  }
}

static bool good_pattern(uint32_t bytes) { return bytes == 1 || bytes == 2 || bytes == 4 || bytes == 8; }

namespace {

Status check_scatter(const Scatter& s) {
  if (s.table <= s.block_bytes && s.payload <= s.block_bytes && s.count <= (s.block_bytes - s.table) / sizeof(Write)) {
    return Status::ok;
  }
  return fail(Status::invalid, "%llu writes do not fit behind offset %llu of a staging block of %llu bytes",
              static_cast<unsigned long long>(s.count), static_cast<unsigned long long>(s.table),
              static_cast<unsigned long long>(s.block_bytes));
}

Status check_spread(const Spread& s) {
  return s.slot_bytes == 4 || s.slot_bytes == 8 ? Status::ok
                                                : fail(Status::invalid, "slot indices have 4 or 8 bytes");
}

void run_scatter(Kernel& kernel, const Scatter& s) {
  const char* block = kernel.read("staging block", s.block, s.block_bytes);
  if (!block) return;
  const uint64_t payload_bytes = s.block_bytes - s.payload;
  for (uint64_t i = 0; i < s.count; ++i) {
    Write w;
    std::memcpy(&w, block + s.table + i * sizeof w, sizeof w);
    if (!w.bytes) continue;
    if (w.fill ? !good_pattern(w.fill) : w.source > payload_bytes || w.bytes > payload_bytes - w.source) {
      return kernel.fail(s.base + w.target, w.bytes, "write " + std::to_string(i) + " of the plan is malformed");
    }
    char* out = kernel.write("target of the plan", s.base + w.target, w.bytes);
    if (!out) return;
    if (w.fill) {
      fill_bytes(out, w.bytes, w.source, w.fill);
    } else {
      std::memcpy(out, block + s.payload + w.source, w.bytes);
    }
  }
}

uint64_t index_at(const char* indices, uint32_t width, uint64_t i) {
  int64_t wide = 0;
  int32_t narrow = 0;
  if (width == 8) {
    std::memcpy(&wide, indices + i * 8, 8);
  } else {
    std::memcpy(&narrow, indices + i * 4, 4);
    wide = narrow;
  }
  return static_cast<uint64_t>(wide);  // a negative one is beyond every limit
}

void run_spread(Kernel& kernel, const Spread& s) {
  if (!s.count || !s.field_count) return;
  const char* records = kernel.read("records", s.records, s.record_bytes * s.count);
  const char* slots = kernel.read("slot indices", s.slots, s.slot_bytes * s.count);
  const char* fields = kernel.read("field map", s.fields, s.field_count * sizeof(Field));
  if (kernel.failed()) return;
  for (uint32_t f = 0; f < s.field_count; ++f) {
    Field field;
    std::memcpy(&field, fields + f * sizeof field, sizeof field);
    const uint64_t base = s.base + field.base;
    if (field.offset > s.record_bytes || field.bytes > s.record_bytes - field.offset) {
      return kernel.fail(base, field.bytes, "field " + std::to_string(f) + " reaches beyond the record");
    }
    for (uint64_t i = 0; i < s.count; ++i) {
      const uint64_t slot = index_at(slots, s.slot_bytes, i);
      if (slot >= s.slot_limit) {
        return kernel.fail(base, field.bytes, "slot of record " + std::to_string(i) + " does not exist");
      }
      char* out = kernel.write("field", base + slot * field.stride, field.bytes);
      if (!out) return;
      std::memcpy(out, records + i * s.record_bytes + field.offset, field.bytes);
    }
  }
}

std::vector<Range> reads_of(const Spread& s) {
  return {{s.records, s.record_bytes * s.count, false},
          {s.slots, s.slot_bytes * s.count, false},
          {s.fields, s.field_count * sizeof(Field), false}};
}

}  // namespace

Status launch_scatter(Stream* stream, const Scatter& s) {
  if (check_scatter(s) != Status::ok) return Status::invalid;
  const std::vector<Range> known{{s.block, s.block_bytes, false}};
  return submit(stream, Kind::kernel_scatter, s.base, s.block, s.block_bytes, known, [s](const OperationRef& op) {
    Kernel kernel(op);
    run_scatter(kernel, s);
  });
}

Status launch_spread(Stream* stream, const Spread& s) {
  if (check_spread(s) != Status::ok) return Status::invalid;
  const uint64_t bytes = s.record_bytes * s.count;
  return submit(stream, Kind::kernel_spread, s.base, s.records, bytes, reads_of(s), [s](const OperationRef& op) {
    Kernel kernel(op);
    run_spread(kernel, s);
  });
}

Status launch_plan(Stream* stream, const Spread& spread, const Scatter& scatter) {
  if (check_spread(spread) != Status::ok || check_scatter(scatter) != Status::ok) return Status::invalid;
  std::vector<Range> known = reads_of(spread);
  known.push_back({scatter.block, scatter.block_bytes, false});
  return submit(stream, Kind::kernel_plan, scatter.base, scatter.block, scatter.block_bytes, known,
                [spread, scatter](const OperationRef& op) {
                  Kernel kernel(op);
                  run_spread(kernel, spread);
                  if (!kernel.failed()) run_scatter(kernel, scatter);
                });
}

// The longest tail of dimensions that is dense on both sides moves as one run.
static void merge_tail(Strided& s) {
  while (s.rank > 0) {
    const uint32_t last = s.rank - 1;
    const auto item = static_cast<int64_t>(s.item_bytes);
    const bool dense = s.dst_strides[last] == item && s.src_strides[last] == item;
    if ((!dense && s.dims[last] != 1) || s.dims[last] * item > UINT32_MAX) return;
    s.item_bytes = static_cast<uint32_t>(s.dims[last] * item);
    --s.rank;
  }
}

Status launch_strided(Stream* stream, const Strided& given) {
  if (given.rank > kMaxRank) return fail(Status::invalid, "%u dimensions, at most %d can be copied", given.rank, kMaxRank);
  uint64_t items = 1;
  for (uint32_t d = 0; d < given.rank; ++d) items *= static_cast<uint64_t>(given.dims[d]);
  Strided s = given;
  const uint64_t bytes = items * s.item_bytes;
  if (items) merge_tail(s);
  return submit(stream, Kind::kernel_strided, s.dst, s.src, bytes, {}, [s, items](const OperationRef& op) {
    Kernel kernel(op);
    int64_t at[kMaxRank] = {};
    for (bool more = items > 0; more;) {
      int64_t to = 0, from = 0;
      for (uint32_t d = 0; d < s.rank; ++d) to += at[d] * s.dst_strides[d], from += at[d] * s.src_strides[d];
      const char* in = kernel.read("source", s.src + static_cast<uint64_t>(from), s.item_bytes);
      char* out = kernel.write("target", s.dst + static_cast<uint64_t>(to), s.item_bytes);
      if (!in || !out) return;
      std::memmove(out, in, s.item_bytes);
      more = false;
      for (uint32_t d = s.rank; d-- > 0;) {
        if (++at[d] < s.dims[d]) {
          more = true;
          break;
        }
        at[d] = 0;
      }
    }
  });
}

Status launch_fill(Stream* stream, uint64_t dst, uint64_t bytes, uint64_t pattern, uint32_t pattern_bytes) {
  if (!good_pattern(pattern_bytes)) return fail(Status::invalid, "a fill pattern has 1, 2, 4 or 8 bytes");
  return submit(stream, Kind::kernel_fill, dst, 0, bytes, {{dst, bytes, true}}, [=](const OperationRef& op) {
    Kernel kernel(op);
    if (char* out = kernel.write("target", dst, bytes)) fill_bytes(out, bytes, pattern, pattern_bytes);
  });
}

Status launch_index_rows(Stream* stream, const IndexRows& r) {
  if (r.index_bytes != 4 && r.index_bytes != 8) return fail(Status::invalid, "row indices have 4 or 8 bytes");
  std::vector<Range> known{{r.index, r.index_bytes * r.count, false}, {r.rows, r.row_bytes * r.count, false}};
  const uint64_t bytes = r.row_bytes * r.count;
  return submit(stream, Kind::kernel_index, r.dst, r.rows, bytes, known, [r, bytes](const OperationRef& op) {
    Kernel kernel(op);
    const char* index = kernel.read("row indices", r.index, r.index_bytes * r.count);
    const char* rows = kernel.read("rows", r.rows, bytes);
    if (kernel.failed()) return;
    const auto type = static_cast<Type>(r.add_type);
    for (uint64_t i = 0; i < r.count * (r.add_type ? 2 : 1); ++i) {
      const bool zero = r.add_type && i < r.count;
      const uint64_t at = i % r.count, row = index_at(index, r.index_bytes, at);
      if (row >= r.dst_rows) return kernel.fail(r.dst, r.row_bytes, "row index " + std::to_string(at) + " is out of range");
      char* out = kernel.write("target row", r.dst + row * r.row_bytes, r.row_bytes);
      if (!out) return;
      if (zero) {
        std::memset(out, 0, r.row_bytes);
      } else if (r.add_type) {
        reduce_into(out, rows + at * r.row_bytes, r.row_bytes / type_bytes(type), type, Reduce::sum);
      } else {
        std::memcpy(out, rows + at * r.row_bytes, r.row_bytes);
      }
    }
  });
}

}  // namespace halsim
