// What a step changes by itself; the same effect as hal_core.slots.update.update_inputs, for every slot of a state.
#include <algorithm>
#include <cstring>

#include "functions.h"

namespace halsim {
namespace {

enum Field {
  kSampled, kAcceptTokens, kPromptLens, kMinLen, kMaxLen, kEosNum, kEosTokens, kStopNum, kStopLen, kStopTokens,
  kSplitRole, kAcceptNum, kStepIdx, kStopFlags, kStopReason, kDecoder, kEncoder, kThisTime, kNext, kDraftNum, kTokenIds, kFields
};

struct Arguments {
  uint64_t address[kFields];
  int32_t slots, max_tokens, max_accept, max_eos, stop_sequences, max_stop_length, speculative;
} __attribute__((packed));

enum Reason : int32_t { kStop = 1, kLength = 2, kError = 4 };  // hal_core.slots.fields.FinishReason
constexpr int32_t kPrefillRole = 1;  // hal_core.slots.fields.SplitRole: such a slot gives one token and stops

// The fields of a state where the kernel reaches them, each [slots, width]; token rows are mapped one at a time.
struct State {
  Arguments a;
  halsim_kernel* kernel;
  char* at[kTokenIds] = {};

  template <typename T>
  T* row(Field f, int32_t slot, int32_t width = 1) const {
    return reinterpret_cast<T*>(at[f]) + static_cast<int64_t>(slot) * width;
  }
  int64_t& i64(Field f, int32_t slot) const { return *row<int64_t>(f, slot); }
  int32_t& i32(Field f, int32_t slot) const { return *row<int32_t>(f, slot); }
  uint8_t& flag(int32_t slot) const { return *row<uint8_t>(kStopFlags, slot); }

  bool map() {
    const size_t n = static_cast<size_t>(a.slots), stops = static_cast<size_t>(a.stop_sequences);
    const size_t bytes[kTokenIds] = {
        n * 8, n * 8 * a.max_accept, n * 8, n * 8, n * 8, n * 4, n * 8 * a.max_eos, n * 4, n * 4 * stops,
        n * 8 * stops * a.max_stop_length, n * 4, n * 4, n * 8, n, n * 4, n * 4, n * 4, n * 4, n * 8, n * 4};
    for (int f = 0; f < kTokenIds; ++f) {
      // Memory that was only read is not written.
      at[f] = f < kAcceptNum ? static_cast<char*>(const_cast<void*>(halsim_kernel_read(kernel, a.address[f], bytes[f])))
                             : static_cast<char*>(halsim_kernel_write(kernel, a.address[f], bytes[f]));
      if (!at[f]) return false;
    }
    return true;
  }
  uint64_t token_address(int32_t slot, int64_t index) const {
    return a.address[kTokenIds] + (static_cast<uint64_t>(slot) * a.max_tokens + index) * 8;
  }
};

bool ends_with_stop(const State& s, int32_t slot, int64_t total, int64_t generated) {
  for (int32_t i = 0; i < s.i32(kStopNum, slot); ++i) {
    const int32_t length = s.row<int32_t>(kStopLen, slot, s.a.stop_sequences)[i];
    if (length <= 0 || length > generated) continue;
    const int64_t* stop = s.row<int64_t>(kStopTokens, slot, s.a.stop_sequences * s.a.max_stop_length);
    const size_t bytes = static_cast<size_t>(length) * 8;
    const void* tail = halsim_kernel_read(s.kernel, s.token_address(slot, total - length), bytes);
    if (tail && !std::memcmp(tail, stop + i * s.a.max_stop_length, bytes)) return true;
  }
  return false;
}

bool is_end_token(const State& s, int32_t slot, int64_t token) {
  const int64_t* ends = s.row<int64_t>(kEosTokens, slot, s.a.max_eos);
  for (int32_t k = 0; k < s.i32(kEosNum, slot); ++k) {
    if (ends[k] == token) return true;
  }
  return false;
}

// Appends tokens until one of them ends the request; how many, and the reason or 0.
int32_t append(const State& s, int32_t slot, const int64_t* given, int32_t wanted, int64_t known, int32_t* reason) {
  int32_t count = 0;
  while (count < wanted && !*reason) {
    const int64_t token = given[count++], total = known + count, generated = s.i64(kStepIdx, slot) + count;
    if (total < 1 || total > s.a.max_tokens) {
      halsim_kernel_fail(s.kernel, "a token would be appended outside its slot's row");
      return count - 1;
    }
    void* place = halsim_kernel_write(s.kernel, s.token_address(slot, total - 1), 8);
    if (!place) return count - 1;
    std::memcpy(place, &token, 8);
    s.i64(kNext, slot) = token;
    const bool ends = is_end_token(s, slot, token) || ends_with_stop(s, slot, total, generated);
    if (ends && generated >= s.i64(kMinLen, slot)) {
      *reason = kStop;
    } else if (generated >= s.i64(kMaxLen, slot) || total >= s.a.max_tokens) {
      *reason = kLength;
    }
  }
  return count;
}

void advance_slot(const State& s, int32_t slot) {
  const bool runs = !s.flag(slot) && s.i32(kThisTime, slot) > 0;
  const int32_t encoder = s.i32(kEncoder, slot), prefilled = s.i32(kDecoder, slot) + encoder;
  const int64_t known = s.i64(kPromptLens, slot) + s.i64(kStepIdx, slot);
  if (runs) {
    if (encoder > 0) s.i32(kDecoder, slot) = prefilled;
    s.i32(kEncoder, slot) = s.i32(kDraftNum, slot) = s.i32(kThisTime, slot) = 0;
  }
  if (!runs || (encoder != 0 && prefilled < known)) {
    s.i32(kAcceptNum, slot) = 0;
    return;
  }
  const bool hands_over = s.i32(kSplitRole, slot) == kPrefillRole;
  const int32_t wanted = s.a.speculative ? s.i32(kAcceptNum, slot) : 1;
  if (wanted < 0 || wanted > s.a.max_accept) {  // left as it is, for save_output to report
    s.flag(slot) = 1;
    s.i32(kStopReason, slot) = kError;
    return;
  }
  const int64_t* given =
      s.a.speculative ? s.row<int64_t>(kAcceptTokens, slot, s.a.max_accept) : s.row<int64_t>(kSampled, slot);
  int32_t reason = 0;
  const int32_t count = append(s, slot, given, hands_over ? std::min(wanted, 1) : wanted, known, &reason);
  s.i32(kAcceptNum, slot) = count;
  s.i64(kStepIdx, slot) += count;
  if (encoder == 0) s.i32(kDecoder, slot) += count;
  if (reason || !s.a.speculative) s.i32(kStopReason, slot) = reason;
  if (reason || (hands_over && count)) {
    s.flag(slot) = 1;
  } else {
    s.i32(kThisTime, slot) = 1;
  }
}

void hal_update_inputs(halsim_kernel* kernel, const void* arguments, size_t bytes) {
  State s{{}, kernel};
  if (bytes != sizeof s.a) return halsim_kernel_fail(kernel, "hal_update_inputs takes the addresses and sizes of a state");
  std::memcpy(&s.a, arguments, sizeof s.a);
  if (!s.map()) return;
  for (int32_t slot = 0; slot < s.a.slots; ++slot) advance_slot(s, slot);
}

const RegisterFunction registered("hal_update_inputs", hal_update_inputs);

}  // namespace
}  // namespace halsim
