// Options of the simulated accelerator: environment variables HALSIM_<NAME> at load, halsim_set_option() later.
#pragma once
#include <atomic>

namespace halsim {

// When a stream runs what was put on it.
enum Mode : long {
  kEager = 0,   // before the call that put it there returns
  kWorker = 1,  // as soon as the stream's worker is free
  kLazy = 2,    // as late as possible: only when somebody waits for it
};

// name, default
#define HALSIM_OPTIONS(X)                                                                                      \
  X(mode, kWorker)                                                                                             \
  X(devices, 2)                                                                                                \
  X(delay_us, 0)                /* sleep before each task */                                                   \
  X(protect, 1)                 /* device addresses are PROT_NONE for the host */                              \
  X(poison, 1)                  /* fill fresh and freed memory, and the host targets of asynchronous copies */ \
  X(staged, 1)                  /* pageable host memory: 0 read when the copy runs, 1 at the call, 2 as 1 and  \
                                   device-to-host copies wait */                                               \
  X(polls, 8)                   /* lazy: queries answered "no" before there is progress */                     \
  X(memory_mb, 1024)            /* memory of each device */                                                    \
  X(oom_null, 1)                /* Paddle: report out of memory as a null pointer, so that it frees its cache and retries */ \
  X(creation_waits, 0)          /* 1: a stream is made once no other of its device is held, as some drivers' */ \
  X(sync_drains, 0)             /* 1: a synchronous copy waits for the whole device first */                   \
  X(check, 1)                   /* the happens-before checker */                                               \
  X(host_threads, 0)            /* 0: the host is one line of time; 1: each thread is its own */               \
  X(trace_capacity, 65536)      /* records kept; older ones are dropped and counted */                         \
  X(wait_limit_ms, 60000)       /* a host wait longer than this is an error, never a hang */                   \
  X(collective_timeout_ms, 30000)                                                                              \
  X(fail_allocation, 0)         /* n: the n-th allocation from now on fails once */                            \
  X(fail_submission, 0)         /* n: the n-th copy or launch from now on is refused once */                   \
  X(max_chunk, 1 << 20)         /* the chunk size reported to Paddle     */

struct Options {
#define HALSIM_DECLARE(name, value) std::atomic<long> name{value};
  HALSIM_OPTIONS(HALSIM_DECLARE)
#undef HALSIM_DECLARE
};

extern Options options;

constexpr int kMaxDevices = 64;

void load_options_from_environment();
std::atomic<long>* find_option(const char* name);  // nullptr when there is none of that name
bool countdown(std::atomic<long>& option);         // true once, when a fail_* option has counted down

}  // namespace halsim
