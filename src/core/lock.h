// The one lock of the library's tables, usable again in a child after fork().
#pragma once

#include <mutex>

namespace tenon {

// Guards the registry and the kernel caches. Held only for look-ups and insertions.
std::mutex& library_lock();

}  // namespace tenon
