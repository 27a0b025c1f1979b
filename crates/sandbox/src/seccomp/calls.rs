//! Lists of system calls and of their requests.

use syscalls::Sysno;

/// A list of system calls by their names.
macro_rules! calls {
    [$($name:ident)*] => { &[$(Sysno::$name),*] };
}

/// Calls on memory, threads, time and open descriptors.
pub(super) const BASIC: &[&[Sysno]] = &[
    // Reading and writing.
    calls![
        read write readv writev pread64 pwrite64 preadv pwritev preadv2 pwritev2 lseek sendfile splice tee
        vmsplice copy_file_range
    ],
    // Descriptors.
    calls![
        close close_range dup dup3 pipe2 eventfd2 signalfd4 timerfd_create timerfd_settime timerfd_gettime
        memfd_create ppoll pselect6 epoll_create1 epoll_ctl epoll_pwait epoll_pwait2
    ],
    // Open files; of others only their metadata.
    calls![
        fstat statx fstatfs statfs ftruncate fallocate fsync fdatasync sync_file_range fadvise64 flock
        getcwd
    ],
    // Open sockets.
    calls![accept accept4 recvfrom recvmsg recvmmsg shutdown getsockopt setsockopt getsockname getpeername],
    // Memory.
    calls![
        munmap mremap madvise brk mlock mlock2 munlock msync mincore membarrier mbind get_mempolicy
        set_mempolicy userfaultfd
    ],
    // Threads.
    calls![
        futex set_robust_list get_robust_list rseq set_tid_address exit exit_group restart_syscall
        sched_yield sched_getaffinity sched_getparam sched_getscheduler sched_get_priority_max
        sched_get_priority_min getcpu getpriority
    ],
    // Signals.
    calls![
        rt_sigaction rt_sigprocmask rt_sigreturn rt_sigtimedwait rt_sigsuspend rt_sigpending sigaltstack
    ],
    // Time.
    calls![clock_gettime clock_getres clock_nanosleep nanosleep gettimeofday],
    // Identity.
    calls![
        getpid getppid gettid getuid geteuid getgid getegid getresuid getresgid getgroups getpgid getsid
        getrlimit getrusage times uname sysinfo getrandom
    ],
    #[cfg(target_arch = "x86_64")]
    calls![dup2 pipe poll select epoll_wait eventfd newfstatat stat lstat time getpgrp arch_prctl],
    #[cfg(target_arch = "aarch64")]
    calls![fstatat],
];

/// Calls that open a file by its path. A copy needs them, restricted by landlock. A device's fail with
/// `EACCES`: the C library tries to open some files and continues without them.
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

/// Calls that remove a file. A device may remove only its own sockets, where the kernel can restrict it to
/// them; others fail silently, as the creator of a socket tries to remove it too.
pub(super) const REMOVE: &[Sysno] = &[
    Sysno::unlinkat,
    #[cfg(target_arch = "x86_64")]
    Sysno::unlink,
];

/// Calls that execute a program. They fail silently, as does the start of a child, which the C library
/// reports.
pub(super) const EXECUTE: &[Sysno] = &[Sysno::execve, Sysno::execveat];

/// Calls of a copy that create and rename files. No call changes the owner, permissions or times of an
/// existing file, which landlock does not restrict. The files for a QEMU of another user are created as that
/// user's, by the thread's user for files (`setfsuid`): only root may set it to another user than its own.
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

/// Requests for sockets, terminals, attached taps (`linux/if_tun.h`), an interface's MTU and index (the scope
/// of an IPv6 address), and this process's page tables (`PAGEMAP_SCAN`). All of `userfaultfd`'s are permitted
/// too, by their type.
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
pub(super) const PRCTLS: [libc::c_int; 11] = [
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
