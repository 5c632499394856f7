// A model that is all arithmetic: the next token is a mix of the request's tokens, read from a paged cache of its own.
#include <algorithm>
#include <cstring>

#include "functions.h"

namespace halsim {
namespace {

enum Field {
  kThisTime, kEncoder, kDecoder, kPromptLens, kStepIdx, kStopFlags, kNext, kDraftNum, kDraftTokens, kBlockTables, kBlocksNum,
  kSeed, kMaxLen, kSampled, kAcceptTokens, kAcceptNum, kTokenIds, kFields
};

struct Arguments {
  uint64_t address[kFields];
  uint64_t cache;  // int64 [blocks, block_size]: the token that was fed at each place
  int32_t slots, max_tokens, max_drafts, max_blocks, block_size, blocks, vocab, speculative;
} __attribute__((packed));

uint64_t mix(uint64_t hash, int64_t token) {
  hash ^= static_cast<uint64_t>(token) + 0x9E3779B97F4A7C15ull + (hash << 6) + (hash >> 2);
  hash *= 0xBF58476D1CE4E5B9ull;
  return hash ^ (hash >> 27);
}

// One slot of a state; each row is mapped where it is used, so that the checker sees what is read and written.
struct Slot {
  const Arguments& a;
  halsim_kernel* kernel;
  int32_t slot;

  uint64_t place(Field f, size_t bytes, int32_t width = 1) const {
    return a.address[f] + static_cast<uint64_t>(slot) * width * bytes;
  }
  template <typename T>
  T get(Field f) const {
    const void* at = halsim_kernel_read(kernel, place(f, sizeof(T)), sizeof(T));
    T value{};
    if (at) std::memcpy(&value, at, sizeof value);
    return value;
  }
  template <typename T>
  const T* row(Field f, int32_t width) const {
    return static_cast<const T*>(halsim_kernel_read(kernel, place(f, sizeof(T), width), sizeof(T) * width));
  }
  template <typename T>
  void put(Field f, T value) const {
    void* at = halsim_kernel_write(kernel, place(f, sizeof(T)), sizeof(T));
    if (at) std::memcpy(at, &value, sizeof value);
  }
  int64_t token(uint64_t hash) const { return static_cast<int64_t>((hash >> 11) % static_cast<uint64_t>(a.vocab)); }

  // Where the cache has a position; 0 where the request holds no block for it.
  uint64_t cached(int64_t position, const int32_t* table, int32_t held) const {
    const int64_t entry = position / a.block_size;
    if (position < 0 || entry >= held || table[entry] < 0 || table[entry] >= a.blocks) {
      halsim_kernel_fail(kernel, "a token is fed outside the blocks of its request");
      return 0;
    }
    return a.cache + (static_cast<uint64_t>(table[entry]) * a.block_size + position % a.block_size) * 8;
  }
};

void step_slot(const Slot& s) {
  const Arguments& a = s.a;
  const int32_t length = s.get<int32_t>(kThisTime), encoder = s.get<int32_t>(kEncoder), context = s.get<int32_t>(kDecoder);
  if (s.get<uint8_t>(kStopFlags) || length <= 0) return;
  const int64_t known = s.get<int64_t>(kPromptLens) + s.get<int64_t>(kStepIdx);
  const int32_t held = s.get<int32_t>(kBlocksNum), drafts = encoder ? 0 : length - 1;
  if (drafts > a.max_drafts || (!encoder && drafts != s.get<int32_t>(kDraftNum)) || context + length > a.max_tokens) {
    return halsim_kernel_fail(s.kernel, "a slot feeds other tokens than it has");
  }
  const int32_t* table = s.row<int32_t>(kBlockTables, a.max_blocks);
  const int64_t* drafted = s.row<int64_t>(kDraftTokens, std::max(a.max_drafts, 1));
  const int64_t next = s.get<int64_t>(kNext);
  const void* prompt = !encoder ? nullptr
      : halsim_kernel_read(s.kernel, s.place(kTokenIds, 8, a.max_tokens) + static_cast<uint64_t>(context) * 8, length * 8ull);
  if (!table || !drafted || (encoder && !prompt)) return;
  for (int32_t i = 0; i < length; ++i) {
    int64_t token = i ? (encoder ? 0 : drafted[i - 1]) : next;
    if (encoder) std::memcpy(&token, static_cast<const char*>(prompt) + i * 8, 8);
    const uint64_t at = s.cached(context + i, table, held);
    void* to = at ? halsim_kernel_write(s.kernel, at, 8) : nullptr;
    if (!to) return;
    std::memcpy(to, &token, 8);
  }
  if (encoder && context + length < known) {  // a piece of the prompt that is not the last gives nothing
    return a.speculative ? s.put<int32_t>(kAcceptNum, 0) : s.put<int64_t>(kSampled, -1);
  }
  const int64_t first = encoder ? context + length - 1 : context;
  uint64_t hash = static_cast<uint64_t>(s.get<int64_t>(kSeed));
  int32_t given = 0;
  int64_t chosen = -1;
  auto* accepted = a.speculative ? static_cast<char*>(halsim_kernel_write(
      s.kernel, s.place(kAcceptTokens, 8, a.max_drafts + 1), 8ull * (a.max_drafts + 1))) : nullptr;
  for (int64_t position = 0; position <= first + drafts; ++position) {
    const uint64_t at = s.cached(position, table, held);
    const void* from = at ? halsim_kernel_read(s.kernel, at, 8) : nullptr;
    if (!from) return;
    int64_t token;
    std::memcpy(&token, from, 8);
    if (position > first && token != chosen) break;  // this draft and those behind it are refused
    hash = mix(hash, token);
    if (position < first) continue;
    chosen = s.token(hash);
    if (accepted) std::memcpy(accepted + 8 * given, &chosen, 8);
    ++given;
  }
  if (a.speculative) {
    s.put<int32_t>(kAcceptNum, given);
  } else {
    s.put<int64_t>(kSampled, chosen);
  }
}

// Drafts for slots that continue decoding: some right, then perhaps a wrong one, at most as many as fit.
void draft_slot(const Slot& s) {
  const Arguments& a = s.a;
  if (s.get<uint8_t>(kStopFlags) || s.get<int32_t>(kThisTime) != 1 || s.get<int32_t>(kEncoder)) return;
  if (s.get<int32_t>(kAcceptNum) < 1) return;
  const int64_t generated = s.get<int64_t>(kStepIdx), known = s.get<int64_t>(kPromptLens) + generated;
  const int64_t covered = static_cast<int64_t>(s.get<int32_t>(kBlocksNum)) * a.block_size;
  const int64_t left = std::min(s.get<int64_t>(kMaxLen) - generated, static_cast<int64_t>(a.max_tokens) - known) - 1;
  const int64_t room = std::min(std::min(left, covered - known), static_cast<int64_t>(a.max_drafts));
  if (room < 1) return;
  uint64_t hash = static_cast<uint64_t>(s.get<int64_t>(kSeed));
  const void* tokens = halsim_kernel_read(s.kernel, s.place(kTokenIds, 8, a.max_tokens), static_cast<size_t>(known) * 8);
  if (!tokens) return;
  for (int64_t at = 0; at < known; ++at) {
    int64_t token;
    std::memcpy(&token, static_cast<const char*>(tokens) + at * 8, 8);
    hash = mix(hash, token);
  }
  const uint64_t whim = mix(hash, known);
  const int32_t count = static_cast<int32_t>(whim % static_cast<uint64_t>(room + 1));
  auto* row = static_cast<char*>(
      halsim_kernel_write(s.kernel, s.place(kDraftTokens, 8, std::max(a.max_drafts, 1)), 8ull * std::max(a.max_drafts, 1)));
  if (!row) return;
  for (int32_t at = 0; at < a.max_drafts; ++at) {
    int64_t token = -1;
    if (at < count) {
      token = s.token(hash);
      if ((whim >> (8 + at)) % 4 == 0) token = (token + 1) % a.vocab;
      hash = mix(hash, token);
    }
    std::memcpy(row + at * 8, &token, 8);
  }
  s.put<int32_t>(kDraftNum, count);
  s.put<int32_t>(kThisTime, 1 + count);
}

template <void (*each)(const Slot&)>
void over_slots(halsim_kernel* kernel, const void* arguments, size_t bytes) {
  Arguments a;
  if (bytes != sizeof a) return halsim_kernel_fail(kernel, "a mix takes the addresses and sizes of a state, and a cache");
  std::memcpy(&a, arguments, sizeof a);
  for (int32_t slot = 0; slot < a.slots; ++slot) each(Slot{a, kernel, slot});
}

const RegisterFunction step_registered("hal_mix_step", over_slots<step_slot>);
const RegisterFunction draft_registered("hal_mix_draft", over_slots<draft_slot>);

}  // namespace
}  // namespace halsim
