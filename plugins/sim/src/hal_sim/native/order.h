// The happens-before checker: which operations are ordered, whatever order they ran in.
//
// Every stream and the host are lines of time with a vector clock each. Putting work on a stream orders it after what
// the host has done and waited for; an event carries its stream's clock to whoever waits for it. Accesses are noted
// when they happen, with the clock of the operation as it was put on its stream: two accesses to the same bytes, one
// of them a write, must be ordered by the clocks, not merely have happened in a good order this time.
#pragma once
#include "journal.h"

namespace halsim {

struct Line {
  int slot = -1;
  Clock clock;
};

Line new_line();
void retire_line(const Line& line);  // its slot is used again once the host has seen everything
// The operation takes its place on the stream's line, after the host that puts it there.
void order_on_stream(Operation& op, Line& line);
void order_on_host(Operation& op);
void join_line(Line& line, const Clock& clock);  // the stream waits for an event
void join_host(const Clock& clock);              // the host waited for an event or a stream
Clock clock_of(const Line& line);

void note_access(const OperationRef& op, uintptr_t begin, size_t bytes, bool write);
// Memory goes away: every access to it must come before; afterwards nothing is known about the addresses.
void note_release(const OperationRef& op, uintptr_t begin, size_t bytes);
// A host thread hands what it knows to another one (only with the option host_threads).
void host_publish(uint64_t token);
void host_acquire(uint64_t token);
size_t noted_segments();
void clear_order();  // call it when nothing is pending: it takes everything so far as seen by the host

}  // namespace halsim
