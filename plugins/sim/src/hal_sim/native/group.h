// A group of processes that communicate over one shared-memory segment, and never wait for ever.
//
// Every wait ends when the condition holds, when a peer has died, has left or has given up, or when the group's timeout
// is over; then the group is dead for all of its members, with the reason.
#pragma once
#include <atomic>
#include <chrono>
#include <string>

#include "journal.h"

namespace halsim {

constexpr uint32_t kMaxRanks = 64;
constexpr size_t kSlotBytes = size_t{1} << 20;   // one a rank, for collectives
constexpr size_t kMailBytes = size_t{256} << 10;  // one a pair of ranks, for send and receive
constexpr size_t kNameBytes = 64;

struct Signature {  // what a rank believes the group does now
  uint32_t kind, type, operator_, root;
  uint64_t bytes;
  bool operator==(const Signature& o) const {
    return kind == o.kind && type == o.type && operator_ == o.operator_ && root == o.root && bytes == o.bytes;
  }
};

struct Member {
  std::atomic<uint32_t> process;
  std::atomic<uint32_t> left;
  std::atomic<uint64_t> started;  // a process number may be given out again; its start time not
  Signature signature;
};

struct Mail {
  std::atomic<uint32_t> full;
  uint32_t bytes;
};

// The segment begins with this, all zero at first.
struct Shared {
  std::atomic<uint32_t> ranks, joined, arrived, generation, dead;
  char reason[160];
  Member members[kMaxRanks];
  Mail mail[kMaxRanks][kMaxRanks];  // from, to
};

struct Group {
  std::string name;
  uint32_t ranks = 0, rank = 0;
  long timeout_ms = 0;
  Shared* shared = nullptr;
  size_t mapped = 0;
  std::string failure;  // of this process; guarded by the rule that one stream at a time runs a group's operations

  using Time = std::chrono::steady_clock::time_point;
  Time deadline() const { return std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms); }
  char* slot(uint32_t of) const;
  char* mail_box(uint32_t from, uint32_t to) const;

  // False: the group is dead; `failure` has the reason.
  bool barrier(Time deadline);
  bool agree(const Signature& signature, Time deadline);  // a barrier at which all must be about to do the same
  // Waits until *word is not (until_change) or is `value`; `what` names it in the failure.
  bool await(std::atomic<uint32_t>& word, uint32_t value, bool until_change, Time deadline, const char* what);
  bool give_up(const std::string& reason);
  bool late(const std::string& what);  // the time is over: gives up, naming the dead or missing ranks
  std::string absent() const;          // the ranks that have not joined
  bool alive();  // false when the group is dead, or has just been found to be
};

std::string new_group_name();  // also sweeps segments whose makers are gone
Status join_group(const char* name, uint32_t ranks, uint32_t rank, Group** out);
Status leave_group(Group* group);
Status check_group(const Group* group);  // refuses a group that is no more, or is dead

}  // namespace halsim
