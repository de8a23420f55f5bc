// Holds the lock across fork(), so that the child finds it free and the tables whole.
#include "core/lock.h"

#include <pthread.h>

namespace tenon {

std::mutex& library_lock() {
  static std::mutex* const lock = [] {
    static std::mutex mutex;
    pthread_atfork([] { library_lock().lock(); }, [] { library_lock().unlock(); },
                   [] { library_lock().unlock(); });
    return &mutex;
  }();
  return *lock;
}

}  // namespace tenon
