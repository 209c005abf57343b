#include "runtime/mapped.h"

#if defined(__unix__) || defined(__APPLE__)
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#else
#include <fstream>
#include <memory>
#endif

#include <atomic>
#include <cerrno>
#include <system_error>

namespace outpace {

// Where a mapping lies, for the signal's handler: it may take no lock, so ranges are never freed, only used again.
struct Mapped::Range {
    std::atomic<bool> taken{true}, torn{false};
    std::atomic<uintptr_t> begin{0}, end{0};
    Range* next = nullptr;
};

#if defined(__unix__) || defined(__APPLE__)
namespace {

std::atomic<Mapped::Range*> first_range{nullptr};
struct sigaction others_action;  // what SIGBUS did before
std::atomic<pthread_t> passing{};
std::atomic<bool> passes{false};  // `passing` is handing a signal on

Mapped::Range* claim() {
    for (Mapped::Range* range = first_range.load(); range; range = range->next)
        if (!range->taken.exchange(true)) return range;
    auto* made = new Mapped::Range;
    made->next = first_range.load();
    while (!first_range.compare_exchange_weak(made->next, made)) {}
    return made;
}

// Zeros from the page of `at` to its mapping's end. False: no mapping of ours has it.
bool mend(uintptr_t at) {
    for (Mapped::Range* range = first_range.load(); range; range = range->next) {
        const uintptr_t begin = range->begin.load(), end = range->end.load();
        if (at < begin || at >= end) continue;
        const uintptr_t page = at & ~(static_cast<uintptr_t>(sysconf(_SC_PAGESIZE)) - 1);
        range->torn.store(true);
        return mmap(reinterpret_cast<void*>(page), end - page, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED;
    }
    return false;
}

// Somebody else's fault goes to whoever handled it before; what comes back from there ends the process, as it would have.
void pass_on(int signal, siginfo_t* info, void* context) {
    const bool again = passes.load() && pthread_equal(passing.load(), pthread_self());
    if (!again && others_action.sa_handler != SIG_DFL && others_action.sa_handler != SIG_IGN) {
        passing.store(pthread_self());
        passes.store(true);
        if (others_action.sa_flags & SA_SIGINFO)
            others_action.sa_sigaction(signal, info, context);
        else
            others_action.sa_handler(signal);
        passes.store(false);
        return;
    }
    ::signal(signal, SIG_DFL);
    raise(signal);
}

void on_fault(int signal, siginfo_t* info, void* context) {
    const int before = errno;
    const bool access = info->si_code > 0;  // of this thread, not sent by somebody
    if (!access || !mend(reinterpret_cast<uintptr_t>(info->si_addr))) pass_on(signal, info, context);
    errno = before;
}

}  // namespace

void Mapped::guard() {
    struct sigaction now{};
    if (sigaction(SIGBUS, nullptr, &now) != 0 || ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == on_fault)) return;
    others_action = now;
    struct sigaction ours{};
    ours.sa_sigaction = on_fault;
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;  // what pass_on calls may fault, or raise the signal again
    sigemptyset(&ours.sa_mask);
    sigaction(SIGBUS, &ours, nullptr);
}

Mapped::Mapped(const std::string& path) {
    const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) throw std::system_error(errno, std::generic_category(), path);
    struct stat found{};
    void* where = nullptr;
    int failed = fstat(file, &found) != 0 ? errno : S_ISREG(found.st_mode) ? 0 : EINVAL;
    if (!failed && found.st_size > 0) {
        size_ = static_cast<size_t>(found.st_size);
        where = mmap(nullptr, size_, PROT_READ, MAP_SHARED, file, 0);
        if (where == MAP_FAILED) failed = errno;
    }
    close(file);
    if (failed) throw std::system_error(failed, std::generic_category(), path);
    data_ = static_cast<const uint8_t*>(where);
    if (size_ == 0) return;
    range_ = claim();
    range_->torn.store(false);
    range_->end.store(reinterpret_cast<uintptr_t>(where) + size_);
    range_->begin.store(reinterpret_cast<uintptr_t>(where));
    guard();
}

Mapped::~Mapped() {
    if (!range_) return;
    range_->end.store(0);
    munmap(const_cast<uint8_t*>(data_), size_);
    range_->taken.store(false);
}

bool Mapped::torn() const { return range_ && range_->torn.load(); }

#else  // here a mapped file could not be cut short, and nobody looks for the handler: the whole file is read

void Mapped::guard() {}

Mapped::Mapped(const std::string& path) {
    std::ifstream file(path, std::ios::binary | std::ios::ate);
    if (!file) throw std::system_error(errno, std::generic_category(), path);
    size_ = static_cast<size_t>(file.tellg());
    std::unique_ptr<char[]> bytes(new char[size_]);
    if (!file.seekg(0).read(bytes.get(), static_cast<std::streamsize>(size_))) throw std::system_error(EIO, std::generic_category(), path);
    data_ = reinterpret_cast<const uint8_t*>(bytes.release());
}

Mapped::~Mapped() { delete[] reinterpret_cast<const char*>(data_); }

bool Mapped::torn() const { return false; }

#endif

}  // namespace outpace
