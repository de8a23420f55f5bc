// Holds the lock across fork(), so that the child finds it free and the tables consistent.
#include "core/lock.h"

#include <pthread.h>

namespace tenon {

std::mutex& library_lock() {
  static std::mutex mutex;
  static const int kHandlers =
      pthread_atfork([] { mutex.lock(); }, [] { mutex.unlock(); }, [] { mutex.unlock(); });
  (void)kHandlers;
  return mutex;
}

}  // namespace tenon
