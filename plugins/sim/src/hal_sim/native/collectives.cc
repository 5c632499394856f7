#include "collectives.h"

#include <algorithm>
#include <cstring>

#include "memory.h"

namespace halsim {

namespace {

uint64_t number(const void* p) { return reinterpret_cast<uint64_t>(p); }

struct Plan {
  Collective c;
  Group* group;
  size_t bytes;          // of one rank's part
  bool sends, receives;  // does this rank read its source, write its target?
  size_t send_bytes, receive_bytes;
};

Plan plan_of(const Collective& c, Group* g) {
  Plan p{c, g, c.count * type_bytes(c.type), true, true, 0, 0};
  const bool root = g->rank == c.root;
  if (c.kind == Kind::broadcast) p.sends = root, p.receives = !root;
  if (c.kind == Kind::reduce) p.receives = root;
  if (c.kind == Kind::barrier) p.sends = p.receives = false;
  p.send_bytes = !p.sends ? 0 : c.kind == Kind::reduce_scatter ? p.bytes * g->ranks : p.bytes;
  p.receive_bytes = !p.receives ? 0 : c.kind == Kind::all_gather ? p.bytes * g->ranks : p.bytes;
  return p;
}

// Every round moves one chunk through the ranks' slots: fill, meet, take, meet.
bool exchange(const Plan& p, const char* in, char* out, size_t chunk, Group::Time deadline) {
  Group& g = *p.group;
  if (in) std::memcpy(g.slot(g.rank), in, chunk);
  if (!g.barrier(deadline)) return false;
  if (out) {
    const size_t elements = chunk / type_bytes(p.c.type);
    if (p.c.kind == Kind::broadcast) {
      std::memcpy(out, g.slot(p.c.root), chunk);
    } else if (p.c.kind == Kind::all_gather) {
      for (uint32_t r = 0; r < g.ranks; ++r) std::memcpy(out + r * p.bytes, g.slot(r), chunk);
    } else {
      std::memcpy(out, g.slot(0), chunk);  // the same order of summing on every rank: equal bits everywhere
      for (uint32_t r = 1; r < g.ranks; ++r) reduce_into(out, g.slot(r), elements, p.c.type, p.c.how);
      if (p.c.how == Reduce::average) divide(out, elements, p.c.type, g.ranks);
    }
  }
  return g.barrier(deadline);
}

bool run_plan(const Plan& p, const char* in, char* out) {
  Group& g = *p.group;
  const Group::Time deadline = g.deadline();
  const Signature signature{static_cast<uint32_t>(p.c.kind), static_cast<uint32_t>(p.c.type),
                            static_cast<uint32_t>(p.c.how), p.c.root, p.bytes};
  if (!g.agree(signature, deadline)) return false;
  if (p.c.kind == Kind::barrier) return g.barrier(deadline);  // no rank overwrites a signature that another still reads
  const uint32_t parts = p.c.kind == Kind::reduce_scatter ? g.ranks : 1;
  for (uint32_t part = 0; part < parts; ++part) {
    for (size_t at = 0; at < p.bytes; at += kSlotBytes) {
      const size_t chunk = std::min(kSlotBytes, p.bytes - at);
      const char* from = in ? in + part * p.bytes + at : nullptr;
      const bool mine = p.c.kind != Kind::reduce_scatter || part == g.rank;
      if (!exchange(p, from, out && mine ? out + at : nullptr, chunk, deadline)) return false;
    }
  }
  return p.bytes > 0 || g.barrier(deadline);
}

void run_collective(const Plan& p, const OperationRef& op) {
  Mapped in, out;
  if (p.send_bytes) in = map_device(op, "collective's source", number(p.c.send), p.send_bytes, op->device);
  if (p.receive_bytes) out = map_device(op, "collective's target", number(p.c.receive), p.receive_bytes, op->device);
  if ((p.send_bytes && !in) || (p.receive_bytes && !out)) {
    p.group->give_up("its operand is not device memory");  // the peers need not find out by waiting
    return;
  }
  if (!run_plan(p, in.data, out.data)) fault(op, ReportKind::collective, 0, 0, p.group->failure);
}

// One step of a transfer that does not wait. True when something moved.
bool advance(const Transfer& t, char* data, size_t* done, bool* finished) {
  Group& g = *t.group;
  const uint32_t from = t.sending ? g.rank : t.peer, to = t.sending ? t.peer : g.rank;
  Mail& mail = g.shared->mail[from][to];
  if ((mail.full == 1) == t.sending) return false;
  const size_t chunk = std::min(kMailBytes, t.bytes - *done);
  if (t.sending) {
    std::memcpy(g.mail_box(from, to), data + *done, chunk);
    mail.bytes = static_cast<uint32_t>(chunk);
    mail.full = 1;
  } else {
    if (mail.bytes != chunk) {
      g.give_up("rank " + std::to_string(from) + " sends another size than rank " + std::to_string(to) + " expects");
      return false;
    }
    std::memcpy(data + *done, g.mail_box(from, to), chunk);
    mail.full = 0;
  }
  *done += chunk;
  *finished = *done == t.bytes;
  return true;
}

bool run_transfers(const std::vector<Transfer>& transfers, const std::vector<Mapped>& data, std::string* why) {
  std::vector<size_t> done(transfers.size(), 0);
  size_t left = transfers.size();
  std::vector<bool> finished(transfers.size(), false);
  for (size_t i = 0; i < transfers.size(); ++i) {
    if (!transfers[i].bytes) finished[i] = true, --left;
  }
  Group::Time deadline = transfers.front().group->deadline();
  for (int idle = 0; left > 0;) {
    bool moved = false;
    for (size_t i = 0; i < transfers.size(); ++i) {
      bool over = false;
      if (finished[i]) continue;
      if (advance(transfers[i], data[i].data, &done[i], &over)) moved = true;
      if (over) finished[i] = true, --left;
    }
    if (moved) {
      idle = 0;
      continue;
    }
    for (size_t i = 0; i < transfers.size(); ++i) {
      Group& g = *transfers[i].group;
      if (finished[i]) continue;
      const bool late = std::chrono::steady_clock::now() >= deadline;
      if (late) g.late("send or receive");
      const uint32_t from = transfers[i].sending ? g.rank : transfers[i].peer;
      const uint32_t to = transfers[i].sending ? transfers[i].peer : g.rank;
      const bool ready = (g.shared->mail[from][to].full == 1) != transfers[i].sending;
      if (late || g.shared->dead || (idle % 100 == 99 && !ready && !g.alive())) {
        g.alive();
        *why = g.failure;
        return false;
      }
    }
    if (++idle < 50) {
      sched_yield();
    } else {
      const timespec pause{0, 50'000};
      nanosleep(&pause, nullptr);
    }
  }
  return true;
}

}  // namespace

Status submit_collective(Group* group, Stream* stream, const Collective& c) {
  Status status = check_group(group);
  if (status != Status::ok) return status;
  if (c.root >= group->ranks) return fail(Status::invalid, "root %u is not in a group of %u", c.root, group->ranks);
  const bool reduces = c.kind == Kind::all_reduce || c.kind == Kind::reduce || c.kind == Kind::reduce_scatter;
  if (reduces && !can_reduce(c.type)) return fail(Status::invalid, "data type %u cannot be reduced", uint32_t(c.type));
  const Plan plan = plan_of(c, group);
  std::vector<Range> ranges;
  if (plan.send_bytes) ranges.push_back({number(c.send), plan.send_bytes, false});
  if (plan.receive_bytes) ranges.push_back({number(c.receive), plan.receive_bytes, true});
  return submit(stream, c.kind, number(c.receive), number(c.send), plan.bytes, ranges,
                [plan](const OperationRef& op) { run_collective(plan, op); });
}

Status submit_transfers(Stream* stream, std::vector<Transfer> transfers) {
  std::vector<Range> ranges;
  uint64_t bytes = 0;
  for (const auto& t : transfers) {
    Status status = check_group(t.group);
    if (status != Status::ok) return status;
    if (t.peer >= t.group->ranks || t.peer == t.group->rank) return fail(Status::invalid, "rank %u is no peer", t.peer);
    ranges.push_back({number(t.buffer), t.bytes, !t.sending});
    bytes += t.bytes;
  }
  if (transfers.empty()) return Status::ok;
  const uint64_t first = number(transfers.front().buffer);
  return submit(stream, Kind::send_recv, first, first, bytes, ranges, [transfers](const OperationRef& op) {
    std::vector<Mapped> data;
    for (const auto& t : transfers) {
      data.push_back(map_device(op, "send or receive buffer", number(t.buffer), t.bytes, op->device));
      if (!data.back()) {
        t.group->give_up("its operand is not device memory");
        return;
      }
    }
    std::string why;
    if (!run_transfers(transfers, data, &why)) fault(op, ReportKind::collective, 0, 0, why);
  });
}

}  // namespace halsim
