#include "server/isolation.h"

#include <fcntl.h>
#include <grp.h>
#include <linux/capability.h>
#include <sched.h>
#include <seccomp.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <cerrno>
#include <csignal>

#include "common/log.h"
#include "common/unique_fd.h"

namespace penstock::server {
namespace {

Status Limit(__rlimit_resource resource, const char* name, rlim_t wanted) {
  rlimit limit;
  const rlimit asked = {wanted, wanted};
  if (setrlimit(resource, &asked) == 0) {
    LOG_DEBUG("isolation", "Limit %s is %ld.", name, static_cast<long>(wanted));
    return {};
  }
  // Only root may raise what it was started with.
  if (getrlimit(resource, &limit) != 0) return FailErrno(std::string("Cannot read limit ") + name);
  if (limit.rlim_max != RLIM_INFINITY && (wanted == RLIM_INFINITY || wanted > limit.rlim_max)) {
    wanted = limit.rlim_max;
  }
  limit.rlim_cur = limit.rlim_max = wanted;
  if (setrlimit(resource, &limit) != 0) return FailErrno(std::string("Cannot set limit ") + name);
  LOG_DEBUG("isolation", "Limit %s is %ld.", name, static_cast<long>(wanted));
  return {};
}

constexpr const char* kForbidden[] = {
    // other processes
    "ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "process_mrelease",
    "kcmp", "pidfd_open", "pidfd_getfd", "pidfd_send_signal", "tkill", "move_pages",
    "migrate_pages",
    // processes and programs of its own
    "fork", "vfork", "execve", "execveat",
    // the kernel itself
    "kexec_load", "kexec_file_load", "init_module", "finit_module", "delete_module", "reboot",
    "bpf", "perf_event_open", "userfaultfd", "iopl", "ioperm", "modify_ldt", "acct", "swapon",
    "swapoff", "quotactl", "quotactl_fd", "fanotify_init", "lookup_dcookie", "vhangup", "syslog",
    "settimeofday", "clock_settime", "adjtimex", "clock_adjtime", "sethostname", "setdomainname",
    // file systems and namespaces
    "mount", "umount2", "pivot_root", "chroot", "setns", "unshare", "open_by_handle_at",
    "name_to_handle_at", "move_mount", "open_tree", "fsopen", "fsconfig", "fsmount", "fspick",
    "mount_setattr",
    // keys, and a way around this filter
    "keyctl", "add_key", "request_key", "io_uring_setup", "io_uring_enter", "io_uring_register"};

// All capabilities go, also those that starting a program could bring back. The bounding set comes
// first, because that takes a capability. To stop being root empties the other sets; a worker that
// stays root, or has got some otherwise, clears them itself.
void DropBoundingSet() {
  for (int capability = 0; prctl(PR_CAPBSET_READ, capability) >= 0; ++capability) {
    (void)prctl(PR_CAPBSET_DROP, capability);  // who may not has none to lose
  }
}

Status ClearCapabilities() {
  (void)prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
  __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
  const __user_cap_data_struct none[_LINUX_CAPABILITY_U32S_3] = {};
  if (syscall(SYS_capset, &header, none) != 0) return FailErrno("Cannot drop capabilities");
  return {};
}

int ForbidIf(scmp_filter_ctx filter, int number, unsigned argument, scmp_compare comparison,
             uint64_t a, uint64_t b = 0) {
  const scmp_arg_cmp when = {argument, comparison, a, b};
  return seccomp_rule_add_array(filter, SCMP_ACT_ERRNO(EPERM), number, 1, &when);
}

// Calls of which a worker needs some forms only.
int AddConditions(scmp_filter_ctx filter) {
  const auto self = static_cast<uint64_t>(getpid());
  int result = ForbidIf(filter, SCMP_SYS(socket), 0, SCMP_CMP_NE, AF_UNIX);
  // Signals and limits are for itself: where the daemon is not root, all workers and the supervisor
  // are one user.
  for (const int call :
       {SCMP_SYS(kill), SCMP_SYS(tgkill), SCMP_SYS(rt_sigqueueinfo), SCMP_SYS(rt_tgsigqueueinfo)}) {
    if (result == 0) result = ForbidIf(filter, call, 0, SCMP_CMP_NE, self);
  }
  if (result == 0) result = ForbidIf(filter, SCMP_SYS(prlimit64), 0, SCMP_CMP_NE, 0);
  // Threads, but neither processes nor namespaces. The flags of clone3 lie in memory, where a
  // filter cannot look; without it libraries fall back to clone.
  if (result == 0) {
    result = ForbidIf(filter, SCMP_SYS(clone), 0, SCMP_CMP_MASKED_EQ, CLONE_THREAD, 0);
  }
  constexpr uint64_t kNamespaces[] = {CLONE_NEWUSER, CLONE_NEWNS,  CLONE_NEWPID,   CLONE_NEWNET,
                                      CLONE_NEWIPC,  CLONE_NEWUTS, CLONE_NEWCGROUP};
  for (const uint64_t flag : kNamespaces) {
    if (result == 0) result = ForbidIf(filter, SCMP_SYS(clone), 0, SCMP_CMP_MASKED_EQ, flag, flag);
  }
  if (result == 0) {
    result = seccomp_rule_add(filter, SCMP_ACT_ERRNO(ENOSYS), SCMP_SYS(clone3), 0);
  }
  // The log may be a terminal; nobody types into it from here.
  for (const uint64_t request : {uint64_t{TIOCSTI}, uint64_t{TIOCLINUX}}) {
    if (result == 0) {
      result = ForbidIf(filter, SCMP_SYS(ioctl), 1, SCMP_CMP_MASKED_EQ, 0xffffffff, request);
    }
  }
  return result;
}

// When memory runs out, one session is lost and not the daemon: what a tenant makes a worker hold
// is the tenant's doing. As the user that the process was started as, for the file is root's later.
void BeFirstToGo() {
  const UniqueFd file(open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC));
  if (!file.valid() || write(file.get(), "800", 3) != 3) {
    LOG_DEBUG("isolation", "The worker's place when memory runs out cannot be set.");
  }
}

}  // namespace

Status Isolate(const SessionParameters& parameters) {
  BeFirstToGo();
  RETURN_IF_ERROR(Limit(RLIMIT_CORE, "core", 0));
  RETURN_IF_ERROR(Limit(RLIMIT_NOFILE, "nofile", 4096));
  RETURN_IF_ERROR(Limit(RLIMIT_MSGQUEUE, "msgqueue", 0));
  // Pinned staging memory counts as locked; a driver that pins through the kernel needs it too.
  RETURN_IF_ERROR(Limit(RLIMIT_MEMLOCK, "memlock", RLIM_INFINITY));
  DropBoundingSet();
  if (parameters.uid != 0) {
    RETURN_IF_ERROR(Limit(RLIMIT_NPROC, "nproc", 4096));
    const gid_t gid = parameters.gid;
    if (setgroups(1, &gid) != 0 || setresgid(gid, gid, gid) != 0) {
      return FailErrno("Cannot take group (" + std::to_string(gid) + ")");
    }
    const uid_t uid = parameters.uid;
    if (setresuid(uid, uid, uid) != 0) {
      return FailErrno("Cannot become user (" + std::to_string(uid) + ")");
    }
    if (setuid(0) == 0) return Fail(Code::kInternal, "The worker could become root again.");
    LOG_DEBUG("isolation", "The worker runs as user %u, group %u.", uid, gid);
    // Changing the user has cleared what SpawnSelf asked for.
    if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) return FailErrno("Cannot follow the supervisor");
    if (getppid() != parameters.supervisor_pid) {
      return Fail(Code::kUnavailable, "The supervisor is gone.");
    }
  } else {
    LOG_DEBUG("isolation", "The worker stays user %u.", getuid());
  }
  RETURN_IF_ERROR(ClearCapabilities());
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) return FailErrno("Cannot set no_new_privs");
  if (prctl(PR_SET_DUMPABLE, 0) != 0) return FailErrno("Cannot become undumpable");
  LOG_DEBUG("isolation", "No new privileges, not dumpable.");
  return {};
}

Status ForbidSystemCalls() {
  scmp_filter_ctx filter = seccomp_init(SCMP_ACT_ALLOW);
  if (filter == nullptr) return Fail(Code::kInternal, "libseccomp gives no filter.");
  int result = seccomp_attr_set(filter, SCMP_FLTATR_CTL_TSYNC, 1);
  int count = 0;
  for (const char* name : kForbidden) {
    const int number = seccomp_syscall_resolve_name(name);
    if (number == __NR_SCMP_ERROR) continue;  // libseccomp is older than the call
    if (result == 0) result = seccomp_rule_add(filter, SCMP_ACT_ERRNO(EPERM), number, 0);
    ++count;
  }
  if (result == 0) result = AddConditions(filter);
  if (result == 0) result = seccomp_load(filter);
  seccomp_release(filter);
  if (result != 0) {
    errno = -result;
    return FailErrno("Cannot load the system call filter");
  }
  LOG_DEBUG(
      "isolation",
      "%d system calls, new processes, signals to others and sockets to the outside are forbidden.",
      count);
  return {};
}

}  // namespace penstock::server
