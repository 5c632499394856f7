// The standard headers that most files need, parsed once for all of them: build.py precompiles this file and includes it
// before each source. Nothing depends on that; every file still includes what it uses.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>
