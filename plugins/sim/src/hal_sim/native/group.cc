#include "group.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <random>
#include <set>

#include "options.h"

namespace halsim {

namespace {

auto& lock = *new std::mutex;
auto& groups = *new std::set<Group*>;
constexpr char kPrefix[] = "halsim_";
constexpr size_t kPage = 4096;
constexpr size_t kHeader = (sizeof(Shared) + kPage - 1) / kPage * kPage;

// State and start time of a process; 0 when it is gone or only waits to be reaped.
uint64_t start_of(uint32_t process) {
  char path[64], text[512];
  std::snprintf(path, sizeof path, "/proc/%u/stat", process);
  FILE* file = std::fopen(path, "r");
  if (!file) return 0;
  const size_t n = std::fread(text, 1, sizeof text - 1, file);
  std::fclose(file);
  text[n] = 0;
  const char* at = std::strrchr(text, ')');  // the name before it may hold anything
  char state = 0;
  unsigned long long started = 0;
  if (!at || std::sscanf(at + 1,
                         " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu", &state,
                         &started) != 2) {
    return 0;
  }
  return state == 'Z' || state == 'X' ? 0 : started;
}

void wait_on(std::atomic<uint32_t>& word, uint32_t seen) {
  // Short, so that a dead peer or a dead group is noticed soon, although no process wakes this word.
  const timespec limit{0, 5'000'000};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, seen, &limit, nullptr, 0);
}

void wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

void sweep_stale_segments() {
  DIR* folder = opendir("/dev/shm");
  if (!folder) return;
  while (const dirent* entry = readdir(folder)) {
    unsigned process = 0;
    unsigned long long started = 0;
    if (std::sscanf(entry->d_name, "halsim_%u_%llu_", &process, &started) != 2) continue;
    if (start_of(process) != started) shm_unlink((std::string("/") + entry->d_name).c_str());
  }
  closedir(folder);
}

}  // namespace

char* Group::slot(uint32_t of) const { return reinterpret_cast<char*>(shared) + kHeader + of * kSlotBytes; }

char* Group::mail_box(uint32_t from, uint32_t to) const {
  return reinterpret_cast<char*>(shared) + kHeader + ranks * kSlotBytes + (from * ranks + to) * kMailBytes;
}

bool Group::give_up(const std::string& reason) {
  uint32_t none = 0;
  if (shared->dead.compare_exchange_strong(none, 1)) {
    std::snprintf(shared->reason, sizeof shared->reason, "rank %u: %s", rank, reason.c_str());
    shared->dead = 2;  // the reason may be read
    wake_all(shared->generation);
  }
  if (failure.empty()) failure = reason;
  return false;
}

bool Group::alive() {
  if (shared->dead) {
    const bool told = shared->dead == 2;
    return give_up(told ? std::string("the group is dead, ") + shared->reason : "the group is dead");
  }
  for (uint32_t r = 0; r < ranks; ++r) {
    const Member& m = shared->members[r];
    if (r == rank || !m.process) continue;
    if (m.left) return give_up("rank " + std::to_string(r) + " has left the group");
    if (start_of(m.process) != m.started) {
      return give_up("rank " + std::to_string(r) + " (process " + std::to_string(m.process) + ") is dead");
    }
  }
  return true;
}

std::string Group::absent() const {
  std::string names;
  for (uint32_t r = 0; r < ranks; ++r) {
    if (!shared->members[r].process) names += (names.empty() ? "" : ", ") + std::to_string(r);
  }
  return names;
}

bool Group::late(const std::string& what) {
  if (!alive()) return false;  // a dead rank is named, even if it is first checked after the timeout
  const std::string missing = absent();
  return give_up(what + ": " + (missing.empty() ? "no answer from a peer" : "rank(s) " + missing + " did not come") +
                 " within " + std::to_string(timeout_ms) + " ms");
}

bool Group::await(std::atomic<uint32_t>& word, uint32_t value, bool until_change, Time deadline, const char* what) {
  int rounds = 0;
  for (;;) {
    const uint32_t seen = word;
    if ((seen == value) != until_change) return true;
    if (shared->dead) return alive();
    if (std::chrono::steady_clock::now() >= deadline) {
      // What it waited for may have come while this process was not running.
      return (word == value) != until_change || late(what);
    }
    if (++rounds < 50) {
      sched_yield();
      continue;
    }
    wait_on(word, seen);
    // A peer may have done its part and ended between the two looks: the word decides, then the peer.
    if (rounds % 4 == 0 && (word == value) == until_change && !alive()) return (word == value) != until_change;
  }
}

bool Group::barrier(Time deadline) {
  if (shared->dead) return alive();
  const uint32_t generation = shared->generation;
  if (++shared->arrived == ranks) {
    shared->arrived = 0;
    ++shared->generation;
    wake_all(shared->generation);
    return true;
  }
  return await(shared->generation, generation, true, deadline, "barrier");
}

bool Group::agree(const Signature& signature, Time deadline) {
  shared->members[rank].signature = signature;
  if (!barrier(deadline)) return false;
  for (uint32_t r = 0; r < ranks; ++r) {
    const Signature& theirs = shared->members[r].signature;
    if (theirs == signature) continue;
    return give_up("ranks " + std::to_string(rank) + " and " + std::to_string(r) + " call different collectives: " +
                   kind_name(static_cast<Kind>(signature.kind)) + " of " + std::to_string(signature.bytes) +
                   " bytes and " + kind_name(static_cast<Kind>(theirs.kind)) + " of " + std::to_string(theirs.bytes));
  }
  return true;
}

std::string new_group_name() {
  sweep_stale_segments();
  std::random_device random;
  char name[kNameBytes];
  const auto process = static_cast<uint32_t>(getpid());
  std::snprintf(name, sizeof name, "/%s%u_%llu_%08x%08x", kPrefix, process,
                static_cast<unsigned long long>(start_of(process)), random(), random());
  return name;
}

Status join_group(const char* name, uint32_t ranks, uint32_t rank, Group** out) {
  if (!ranks || ranks > kMaxRanks || rank >= ranks) {
    return fail(Status::invalid, "rank %u of %u: a group has 1 to %u ranks", rank, ranks, kMaxRanks);
  }
  auto* g = new Group;
  g->name = name;
  g->ranks = ranks;
  g->rank = rank;
  g->timeout_ms = options.collective_timeout_ms;
  g->mapped = kHeader + ranks * kSlotBytes + size_t{ranks} * ranks * kMailBytes;  // sparse: untouched pages cost nothing
  const int fd = shm_open(name, O_CREAT | O_RDWR, 0600);
  void* at = MAP_FAILED;
  if (fd >= 0 && ftruncate(fd, static_cast<off_t>(g->mapped)) == 0) {
    at = mmap(nullptr, g->mapped, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  }
  if (fd >= 0) close(fd);
  if (at == MAP_FAILED) {
    delete g;
    return fail(Status::no_memory, "no shared memory for group %s; see the size of /dev/shm", name);
  }
  g->shared = static_cast<Shared*>(at);
  Member& me = g->shared->members[rank];
  uint32_t agreed = 0;
  const bool same_size = g->shared->ranks.compare_exchange_strong(agreed, ranks) || agreed == ranks;
  if (!same_size || me.process) {
    munmap(at, g->mapped);
    delete g;
    return same_size ? fail(Status::invalid, "rank %u of group %s is taken", rank, name)
                     : fail(Status::invalid, "group %s has %u ranks, not %u", name, agreed, ranks);
  }
  me.started = start_of(static_cast<uint32_t>(getpid()));
  me.process = static_cast<uint32_t>(getpid());
  ++g->shared->joined;
  wake_all(g->shared->joined);
  const bool complete = g->await(g->shared->joined, ranks, false, g->deadline(), "joining the group");
  shm_unlink(name);  // everyone has it mapped, or never will: nothing is left behind
  if (!complete) {
    const std::string reason = g->failure;
    munmap(at, g->mapped);
    delete g;
    return fail(Status::lost, "group %s: %s", name, reason.c_str());
  }
  std::lock_guard<std::mutex> guard(lock);
  groups.insert(g);
  *out = g;
  return Status::ok;
}

Status check_group(const Group* group) {
  {
    std::lock_guard<std::mutex> guard(lock);
    if (!groups.count(const_cast<Group*>(group))) return fail(Status::invalid, "no such group, or it was left");
  }
  if (!group->shared->dead) return Status::ok;
  return fail(Status::lost, "the group is dead, %s", group->shared->dead == 2 ? group->shared->reason : "a peer is lost");
}

Status leave_group(Group* group) {
  {
    std::lock_guard<std::mutex> guard(lock);
    if (!groups.erase(group)) return fail(Status::invalid, "no such group, or it was left");
  }
  group->shared->members[group->rank].left = 1;
  // The segment stays mapped: an operation that is still queued on a stream ends with an error, not with a crash.
  return Status::ok;
}

}  // namespace halsim
