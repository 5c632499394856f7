#include "order.h"

#include <algorithm>
#include <map>
#include <mutex>

#include "options.h"
#include "stream.h"

namespace halsim {

namespace {

struct Segment {
  uintptr_t end;
  OperationRef write;                // the last one
  std::vector<OperationRef> reads;   // since then, none ordered before another
};

auto& lock = *new std::mutex;
auto& shadow = *new std::map<uintptr_t, Segment>;  // by first address; host and device share one address space
auto& latest = *new Clock(1, 0);                   // the last tick given out on each line
auto& hosts = *new std::map<int, Line>;
auto& published = *new std::map<uint64_t, Clock>;
auto& retired = *new std::vector<int>;
auto& spare = *new std::vector<int>;
thread_local int host_slot = -1;

int new_slot() {
  if (!spare.empty()) {
    const int slot = spare.back();
    spare.pop_back();
    return slot;
  }
  latest.push_back(0);
  return static_cast<int>(latest.size()) - 1;
}

void join(Clock& into, const Clock& from) {
  if (into.size() < from.size()) into.resize(from.size(), 0);
  for (size_t i = 0; i < from.size(); ++i) into[i] = std::max(into[i], from[i]);
}

void tick(Line& line) {
  if (line.clock.size() <= static_cast<size_t>(line.slot)) line.clock.resize(line.slot + 1, 0);
  line.clock[line.slot] = ++latest[line.slot];
}

Line& host_line() {
  int slot = 0;
  if (options.host_threads) {
    if (host_slot < 0) host_slot = new_slot();
    slot = host_slot;
  }
  Line& line = hosts[slot];
  line.slot = slot;
  return line;
}

bool ordered(const Operation& before, const Operation& op) {
  return static_cast<size_t>(before.line) < op.after.size() && op.after[before.line] >= before.tick;
}

void place(Operation& op, const Line& line) {
  op.line = line.slot;
  op.tick = line.clock[line.slot];
  op.after = line.clock;
}

// Cuts the segment that spans an address, so that ranges begin and end at segment borders.
void cut(uintptr_t at) {
  auto it = shadow.upper_bound(at);
  if (it == shadow.begin()) return;
  --it;
  if (it->first >= at || it->second.end <= at) return;
  Segment right = it->second;
  it->second.end = at;
  shadow.emplace(at, std::move(right));
}

struct Conflict {
  OperationRef first;
  uintptr_t begin, end;
  const char* what;
};

std::vector<Conflict> conflicts_in(const Operation& op, uintptr_t begin, uintptr_t end, bool write) {
  std::vector<Conflict> found;
  auto note = [&](const OperationRef& first, uintptr_t from, uintptr_t to, const char* what) {
    for (auto& c : found) {
      if (c.first == first) return;
    }
    found.push_back({first, from, to, what});
  };
  for (auto it = shadow.lower_bound(begin); it != shadow.end() && it->first < end; ++it) {
    const Segment& s = it->second;
    if (s.write && !ordered(*s.write, op)) note(s.write, it->first, s.end, write ? "write/write" : "write/read");
    if (!write) continue;
    for (const auto& r : s.reads) {
      if (!ordered(*r, op)) note(r, it->first, s.end, "read/write");
    }
  }
  return found;
}

void add_read(Segment& s, const OperationRef& op) {
  // A read that comes before this one needs no place of its own: a write after this one comes after both.
  s.reads.erase(std::remove_if(s.reads.begin(), s.reads.end(), [&](const auto& r) { return ordered(*r, *op); }),
                s.reads.end());
  s.reads.push_back(op);
}

void store_read(const OperationRef& op, uintptr_t begin, uintptr_t end) {
  uintptr_t at = begin;
  auto it = shadow.lower_bound(begin);
  while (at < end) {
    if (it != shadow.end() && it->first == at) {
      add_read(it->second, op);
      at = it->second.end;
      ++it;
      continue;
    }
    uintptr_t gap_end = it != shadow.end() ? std::min(end, it->first) : end;
    it = std::next(shadow.emplace(at, Segment{gap_end, nullptr, {op}}).first);
    at = gap_end;
  }
}

void publish_conflicts(const std::vector<Conflict>& found, const OperationRef& op, ReportKind kind) {
  for (const auto& c : found) {
    // Found in the order of execution, reported in the order of issue.
    const bool issued_first = c.first->sequence < op->sequence;
    std::string what = c.what;
    if (!issued_first && what == "read/write") {
      what = "write/read";
    } else if (!issued_first && what == "write/read") {
      what = "read/write";
    }
    report(kind, issued_first ? c.first : op, issued_first ? op : c.first, c.begin, c.end - c.begin, what);
  }
}

// When the host has seen the end of everything, no later operation can be unordered with what is noted.
void forget_when_quiet(const Line& host) {
  if (options.host_threads || pending_tasks() > 0 || (shadow.empty() && retired.empty())) return;
  for (size_t i = 1; i < latest.size(); ++i) {
    if (latest[i] && (i >= host.clock.size() || host.clock[i] < latest[i])) return;
  }
  shadow.clear();
  spare.insert(spare.end(), retired.begin(), retired.end());
  retired.clear();
}

}  // namespace

Line new_line() {
  std::lock_guard<std::mutex> guard(lock);
  Line line;
  line.slot = new_slot();
  return line;
}

void retire_line(const Line& line) {
  std::lock_guard<std::mutex> guard(lock);
  retired.push_back(line.slot);
}

void order_on_stream(Operation& op, Line& line) {
  std::lock_guard<std::mutex> guard(lock);
  join(line.clock, host_line().clock);
  tick(line);
  place(op, line);
}

void order_on_host(Operation& op) {
  std::lock_guard<std::mutex> guard(lock);
  Line& host = host_line();
  tick(host);
  place(op, host);
}

void join_line(Line& line, const Clock& clock) {
  std::lock_guard<std::mutex> guard(lock);
  join(line.clock, clock);
}

void join_host(const Clock& clock) {
  std::lock_guard<std::mutex> guard(lock);
  Line& host = host_line();
  join(host.clock, clock);
  forget_when_quiet(host);
}

Clock clock_of(const Line& line) {
  std::lock_guard<std::mutex> guard(lock);
  return line.clock;
}

void note_access(const OperationRef& op, uintptr_t begin, size_t bytes, bool write) {
  if (!options.check || !bytes || op->line < 0) return;
  uintptr_t end = begin + bytes;
  std::vector<Conflict> found;
  {
    std::lock_guard<std::mutex> guard(lock);
    cut(begin);
    cut(end);
    found = conflicts_in(*op, begin, end, write);
    // Everything put on a stream from now on comes after the host's access, so it matters to pending work only.
    bool keep = op->stream >= 0 || options.host_threads || pending_tasks() > 0;
    if (keep && write) {
      shadow.erase(shadow.lower_bound(begin), shadow.lower_bound(end));
      shadow.emplace(begin, Segment{end, op, {}});
    } else if (keep) {
      store_read(op, begin, end);
    }
  }
  publish_conflicts(found, op, ReportKind::race);
}

void note_release(const OperationRef& op, uintptr_t begin, size_t bytes) {
  if (!options.check || !bytes) return;
  std::vector<Conflict> found;
  {
    std::lock_guard<std::mutex> guard(lock);
    cut(begin);
    cut(begin + bytes);
    found = conflicts_in(*op, begin, begin + bytes, true);
    for (auto& c : found) c.what = "released before its last use was waited for";
    shadow.erase(shadow.lower_bound(begin), shadow.lower_bound(begin + bytes));
  }
  publish_conflicts(found, op, ReportKind::lifetime);
}

void host_publish(uint64_t token) {
  std::lock_guard<std::mutex> guard(lock);
  Line& host = host_line();
  tick(host);
  join(published[token], host.clock);
  tick(host);  // what this thread does next is not part of what it handed over
}

void host_acquire(uint64_t token) {
  std::lock_guard<std::mutex> guard(lock);
  auto it = published.find(token);
  if (it != published.end()) join(host_line().clock, it->second);
}

size_t noted_segments() {
  std::lock_guard<std::mutex> guard(lock);
  return shadow.size();
}

void clear_order() {
  std::lock_guard<std::mutex> guard(lock);
  shadow.clear();
  published.clear();
  for (auto& host : hosts) join(host.second.clock, latest);
  forget_when_quiet(host_line());
}

}  // namespace halsim
