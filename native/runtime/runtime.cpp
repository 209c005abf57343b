#include "runtime/runtime.h"

#include <algorithm>
#include <vector>

#include "platform.h"

namespace outpace {

// All runtimes of the process, for the moments before and after a fork. Never destroyed: a fork may come at any time.
struct Forks {
    std::mutex mutex;
    std::vector<Runtime*> runtimes;

    static Forks& all() {
        static Forks* const forks = [] {
            at_fork(&before, &in_parent, &in_child);
            return new Forks;
        }();
        return *forks;
    }

    static void before() {
        all().mutex.lock();
        for (Runtime* runtime : all().runtimes) runtime->lock_.lock();  // a forward ends without any other lock
    }
    static void in_parent() {
        for (Runtime* runtime : all().runtimes) runtime->lock_.unlock();
        all().mutex.unlock();
    }
    static void in_child() {
        for (Runtime* runtime : all().runtimes) runtime->forked_ = true;
        in_parent();  // this thread is the one that locked them
    }
};

Runtime::Runtime(int threads) : pool_(std::make_unique<Pool>(threads)), threads_(pool_->size()), scratch_(threads_) {
    Forks& forks = Forks::all();
    std::lock_guard<std::mutex> lock(forks.mutex);
    forks.runtimes.push_back(this);
}

Runtime::~Runtime() {
    {
        Forks& forks = Forks::all();
        std::lock_guard<std::mutex> lock(forks.mutex);
        forks.runtimes.erase(std::find(forks.runtimes.begin(), forks.runtimes.end(), this));
    }
    forget_threads();
}

Pool& Runtime::pool() {
    if (forked_) {
        forget_threads();
        pool_ = std::make_unique<Pool>(threads_);
        forked_ = false;
    }
    return *pool_;
}

// In a forked child the pool cannot be taken down: nobody would end its threads or leave its conditions. It stays as it
// is, a few hundred bytes that nobody knows.
void Runtime::forget_threads() {
    if (forked_) static_cast<void>(pool_.release());
}

}  // namespace outpace
