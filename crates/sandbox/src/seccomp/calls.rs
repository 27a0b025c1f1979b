//! Lists of system calls and of their requests.

use syscalls::Sysno;

/// Calls on memory, threads, time and open descriptors.
pub(super) const BASIC: &[Sysno] = &[
    // Reading and writing.
    Sysno::read,
    Sysno::write,
    Sysno::readv,
    Sysno::writev,
    Sysno::pread64,
    Sysno::pwrite64,
    Sysno::preadv,
    Sysno::pwritev,
    Sysno::preadv2,
    Sysno::pwritev2,
    Sysno::lseek,
    Sysno::sendfile,
    Sysno::splice,
    Sysno::tee,
    Sysno::vmsplice,
    Sysno::copy_file_range,
    // Descriptors.
    Sysno::close,
    Sysno::close_range,
    Sysno::dup,
    Sysno::dup3,
    Sysno::pipe2,
    Sysno::eventfd2,
    Sysno::signalfd4,
    Sysno::timerfd_create,
    Sysno::timerfd_settime,
    Sysno::timerfd_gettime,
    Sysno::memfd_create,
    Sysno::ppoll,
    Sysno::pselect6,
    Sysno::epoll_create1,
    Sysno::epoll_ctl,
    Sysno::epoll_pwait,
    Sysno::epoll_pwait2,
    // Open files; of others only their metadata.
    Sysno::fstat,
    Sysno::statx,
    Sysno::fstatfs,
    Sysno::statfs,
    Sysno::ftruncate,
    Sysno::fallocate,
    Sysno::fsync,
    Sysno::fdatasync,
    Sysno::sync_file_range,
    Sysno::fadvise64,
    Sysno::flock,
    Sysno::getcwd,
    // Open sockets.
    Sysno::accept,
    Sysno::accept4,
    Sysno::recvfrom,
    Sysno::recvmsg,
    Sysno::recvmmsg,
    Sysno::shutdown,
    Sysno::getsockopt,
    Sysno::setsockopt,
    Sysno::getsockname,
    Sysno::getpeername,
    // Memory.
    Sysno::munmap,
    Sysno::mremap,
    Sysno::madvise,
    Sysno::brk,
    Sysno::mlock,
    Sysno::mlock2,
    Sysno::munlock,
    Sysno::msync,
    Sysno::mincore,
    Sysno::membarrier,
    Sysno::mbind,
    Sysno::get_mempolicy,
    Sysno::set_mempolicy,
    Sysno::userfaultfd,
    // Threads.
    Sysno::futex,
    Sysno::set_robust_list,
    Sysno::get_robust_list,
    Sysno::rseq,
    Sysno::set_tid_address,
    Sysno::exit,
    Sysno::exit_group,
    Sysno::restart_syscall,
    Sysno::sched_yield,
    Sysno::sched_getaffinity,
    Sysno::sched_getparam,
    Sysno::sched_getscheduler,
    Sysno::sched_get_priority_max,
    Sysno::sched_get_priority_min,
    Sysno::getcpu,
    Sysno::getpriority,
    // Signals.
    Sysno::rt_sigaction,
    Sysno::rt_sigprocmask,
    Sysno::rt_sigreturn,
    Sysno::rt_sigtimedwait,
    Sysno::rt_sigsuspend,
    Sysno::rt_sigpending,
    Sysno::sigaltstack,
    // Time.
    Sysno::clock_gettime,
    Sysno::clock_getres,
    Sysno::clock_nanosleep,
    Sysno::nanosleep,
    Sysno::gettimeofday,
    // Identity.
    Sysno::getpid,
    Sysno::getppid,
    Sysno::gettid,
    Sysno::getuid,
    Sysno::geteuid,
    Sysno::getgid,
    Sysno::getegid,
    Sysno::getresuid,
    Sysno::getresgid,
    Sysno::getgroups,
    Sysno::getpgid,
    Sysno::getsid,
    Sysno::getrlimit,
    Sysno::getrusage,
    Sysno::times,
    Sysno::uname,
    Sysno::sysinfo,
    Sysno::getrandom,
    #[cfg(target_arch = "x86_64")]
    Sysno::dup2,
    #[cfg(target_arch = "x86_64")]
    Sysno::pipe,
    #[cfg(target_arch = "x86_64")]
    Sysno::poll,
    #[cfg(target_arch = "x86_64")]
    Sysno::select,
    #[cfg(target_arch = "x86_64")]
    Sysno::epoll_wait,
    #[cfg(target_arch = "x86_64")]
    Sysno::eventfd,
    #[cfg(target_arch = "x86_64")]
    Sysno::newfstatat,
    #[cfg(target_arch = "x86_64")]
    Sysno::stat,
    #[cfg(target_arch = "x86_64")]
    Sysno::lstat,
    #[cfg(target_arch = "x86_64")]
    Sysno::time,
    #[cfg(target_arch = "x86_64")]
    Sysno::getpgrp,
    #[cfg(target_arch = "x86_64")]
    Sysno::arch_prctl,
    #[cfg(target_arch = "aarch64")]
    Sysno::fstatat,
];

/// Calls that open a file by its path. A copy needs them, restricted by landlock. A device's fail with `EACCES`: the C library
/// tries to open some files by itself and continues without them.
pub(super) const OPEN: &[Sysno] = &[
    Sysno::openat,
    Sysno::openat2,
    Sysno::readlinkat,
    Sysno::faccessat,
    Sysno::faccessat2,
    Sysno::getdents64,
    #[cfg(target_arch = "x86_64")]
    Sysno::open,
    #[cfg(target_arch = "x86_64")]
    Sysno::readlink,
    #[cfg(target_arch = "x86_64")]
    Sysno::access,
    #[cfg(target_arch = "x86_64")]
    Sysno::creat,
];

/// Commands of `fcntl` that are refused: they make the kernel send signals to other processes.
pub(super) const FCNTL_SIGNALS: [libc::c_int; 4] = [libc::F_SETOWN, F_SETOWN_EX, F_SETSIG, libc::F_NOTIFY];
/// `asm-generic/fcntl.h`.
const F_SETSIG: libc::c_int = 10;
/// `asm-generic/fcntl.h`.
const F_SETOWN_EX: libc::c_int = 15;

/// Calls that remove a file. A device may remove only its own sockets, where the kernel can restrict it to them; others fail
/// silently, as the creator of a socket tries to remove it too.
pub(super) const REMOVE: &[Sysno] = &[
    Sysno::unlinkat,
    #[cfg(target_arch = "x86_64")]
    Sysno::unlink,
];

/// Calls that execute a program. They fail silently, as does the start of a child, which the C library reports.
pub(super) const EXECUTE: &[Sysno] = &[Sysno::execve, Sysno::execveat];

/// Calls of a copy that create and rename files. No call changes the owner, permissions or times of an existing file, which landlock
/// does not restrict. The files for a QEMU of another user are created as that user's, by the thread's user for files (`setfsuid`):
/// only root may set it to another user than its own.
pub(super) const CREATE: &[Sysno] = &[
    Sysno::mkdirat,
    Sysno::renameat,
    Sysno::renameat2,
    Sysno::linkat,
    Sysno::umask,
    Sysno::setfsuid,
    Sysno::setfsgid,
    #[cfg(target_arch = "x86_64")]
    Sysno::mkdir,
    #[cfg(target_arch = "x86_64")]
    Sysno::rmdir,
    #[cfg(target_arch = "x86_64")]
    Sysno::rename,
    #[cfg(target_arch = "x86_64")]
    Sysno::link,
];

/// Requests for sockets, terminals, attached taps (`linux/if_tun.h`), an interface's MTU and index (the scope of an IPv6 address),
/// and this process's page tables (`PAGEMAP_SCAN`). All of `userfaultfd`'s are permitted too, by their type.
pub(super) const IOCTLS: &[u64] = &[
    libc::FIONREAD,
    libc::FIONBIO,
    libc::FIOCLEX,
    libc::TCGETS,
    libc::TIOCGWINSZ,
    libc::SIOCGIFMTU,
    libc::SIOCGIFINDEX,
    libc::TUNSETOFFLOAD,
    libc::TUNSETVNETHDRSZ,
    libc::TUNSETQUEUE,
    libc::TUNGETIFF,
    PAGEMAP_SCAN,
];
/// `linux/fs.h`.
const PAGEMAP_SCAN: u64 = 0xc060_6610;
/// Type of `UFFDIO_*`, their second byte.
pub(super) const UFFDIO: u64 = 0xaa00;

/// Options of `prctl` that only concern the caller.
pub(super) const PRCTLS: &[libc::c_int] = &[
    libc::PR_SET_NAME,
    libc::PR_GET_NAME,
    PR_SET_VMA,
    PR_GET_AUXV,
    libc::PR_SET_NO_NEW_PRIVS,
    libc::PR_GET_NO_NEW_PRIVS,
    libc::PR_GET_DUMPABLE,
    libc::PR_GET_SECCOMP,
    libc::PR_CAPBSET_READ,
    libc::PR_SET_TIMERSLACK,
    libc::PR_SET_THP_DISABLE,
];

/// `linux/prctl.h`: the processor's features, for the standard library.
const PR_GET_AUXV: libc::c_int = 0x4155_5856;
/// `linux/prctl.h`: names memory.
const PR_SET_VMA: libc::c_int = 0x5356_4d41;
