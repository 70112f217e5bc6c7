// Runs a function; an access to memory that is protected ends it. One handler for all threads.
#include <csetjmp>
#include <csignal>

static thread_local sigjmp_buf leave;
static thread_local bool running = false;
static thread_local void* address;
static struct sigaction before;

static void on_fault(int, siginfo_t* info, void*) {
    if (!running) {  // not here: the access is repeated with the handler that was there
        sigaction(SIGSEGV, &before, nullptr);
        return;
    }
    running = false;
    address = info->si_addr;
    siglongjmp(leave, 1);
}
extern "C" void guard() {
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(SIGSEGV, &action, &before);
}
// The address of the access that ended it, or null.
extern "C" void* guarded(void (*run)(void*), void* launch) {
    if (sigsetjmp(leave, 1)) return address;
    running = true;
    run(launch);
    running = false;
    return nullptr;
}
