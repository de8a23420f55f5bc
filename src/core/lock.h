// The single lock of the library's tables. It works in a child after fork().
#pragma once

#include <mutex>

namespace tenon {

// Guards the registry and the kernel caches. Held only for look-ups and insertions.
std::mutex& library_lock();

}  // namespace tenon
