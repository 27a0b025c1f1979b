//! Seccomp: which system calls there are.
//!
//! Three filters, of which the strictest answer counts: some calls are answered quietly with the error that the C library
//! and ours expect of a system without them; of the others those that are listed are done, and the rest fails loudly
//! ([`super::sys`]). A call without conditions costs nothing measurable: the kernel remembers that it is always allowed.

use std::collections::BTreeMap;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch, apply_filter, apply_filter_all_threads,
};
use syscalls::Sysno;

use super::{Policy, Ports, sys};

type Rules = BTreeMap<i64, Vec<SeccompRule>>;
type Made<T> = Result<T, seccompiler::BackendError>;

/// What works on memory, threads, time, and on what is open already.
const HARMLESS: &[Sysno] = &[
    // Reading, writing, moving bytes.
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
    // Files that are open; of others only what their names say.
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
    // Sockets that are open.
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
    // Threads and their waiting.
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
    // Of a child that could not become another program.
    Sysno::wait4,
    Sysno::waitid,
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
    // Who and where we are.
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

/// Opens a file by its name. A copy needs these, and landlock says which; with a device they fail as on a file that its user
/// may not read, for the C library looks at some by itself and goes on without.
const OPENING: &[Sysno] = &[
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

/// What `fcntl` must not: have the kernel send signals, of which the receiver is not asked.
const SIGNALLING: [libc::c_int; 4] = [libc::F_SETOWN, F_SETOWN_EX, F_SETSIG, libc::F_NOTIFY];
/// `asm-generic/fcntl.h`.
const F_SETSIG: libc::c_int = 10;
/// `asm-generic/fcntl.h`.
const F_SETOWN_EX: libc::c_int = 15;

/// Removes a file. With a device only the sockets that it made, if the kernel can hold it to them: quietly, for whoever made
/// one tries to remove it, too.
const REMOVING: &[Sysno] = &[
    Sysno::unlinkat,
    #[cfg(target_arch = "x86_64")]
    Sysno::unlink,
];

/// Starts a program. Refused quietly, too: the C library does it in a child that has no handlers, and reports the error.
const EXECUTING: &[Sysno] = &[Sysno::execve, Sysno::execveat];

/// Makes, names and owns files; listens; watches whether a QEMU exits. For copies.
const MAKING: &[Sysno] = &[
    Sysno::pidfd_open,
    Sysno::mkdirat,
    Sysno::renameat,
    Sysno::renameat2,
    Sysno::linkat,
    Sysno::fchmod,
    Sysno::fchmodat,
    Sysno::fchown,
    Sysno::fchownat,
    Sysno::utimensat,
    Sysno::umask,
    Sysno::bind,
    Sysno::listen,
    Sysno::connect,
    #[cfg(target_arch = "x86_64")]
    Sysno::mkdir,
    #[cfg(target_arch = "x86_64")]
    Sysno::rmdir,
    #[cfg(target_arch = "x86_64")]
    Sysno::rename,
    #[cfg(target_arch = "x86_64")]
    Sysno::link,
    #[cfg(target_arch = "x86_64")]
    Sysno::chmod,
    #[cfg(target_arch = "x86_64")]
    Sysno::chown,
];

/// What descriptors are told: sockets, terminals, taps that are attached (`linux/if_tun.h`), an interface's MTU and number (the
/// scope of an IPv6 address), our own page tables (`PAGEMAP_SCAN`). All of `userfaultfd`'s are allowed too, by their type.
const IOCTLS: &[u64] = &[
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
/// The type that `UFFDIO_*` have in their second byte.
const UFFDIO: u64 = 0xaa00;

/// What a thread may be told of itself.
const PRCTLS: &[libc::c_int] = &[
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

/// `linux/prctl.h`: what the processor can do, for the standard library.
const PR_GET_AUXV: libc::c_int = 0x4155_5856;
/// `linux/prctl.h`: names memory.
const PR_SET_VMA: libc::c_int = 0x5356_4d41;

/// `clone` makes threads, and no namespaces.
const NAMESPACES: libc::c_int = libc::CLONE_NEWNS
    | libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET;

/// The kind of a socket without its flags.
const KIND: u64 = 0xf;

/// Which threads a filter binds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Threads {
    /// All of the process.
    All,
    /// The one that asks, and those that it starts.
    This,
}

/// Confines threads; of files only those at these addresses of names can be removed, if there are any. Says what this kernel
/// lacks.
pub(super) fn confine(policy: &Policy, names: Option<&[u64]>, threads: Threads) -> Result<(), String> {
    let lack = |why: String| format!("seccomp: {why}; system calls are not confined");
    let filters = filters(policy, names).map_err(|error| lack(error.to_string()))?;
    sys::answer_refused_calls().map_err(|error| lack(error.to_string()))?;
    for filter in &filters {
        let applied = match threads {
            Threads::All => apply_filter_all_threads(filter),
            Threads::This => apply_filter(filter),
        };
        applied.map_err(|error| lack(error.to_string()))?;
    }
    Ok(())
}

/// The last is the one that lists what there is; behind it no filter can be put.
fn filters(policy: &Policy, names: Option<&[u64]>) -> Made<Vec<BpfProgram>> {
    let arch = TargetArch::try_from(std::env::consts::ARCH)?;
    let quiet = |calls: &[Sysno], errno: libc::c_int| -> Made<BpfProgram> {
        let action = SeccompAction::Errno(errno.unsigned_abs());
        SeccompFilter::new(always(calls), SeccompAction::Allow, action, arch)?.try_into()
    };
    // Its flags are in memory, where no filter sees them; without it the C library takes `clone`.
    let mut filters = vec![quiet(&[Sysno::clone3], libc::ENOSYS)?, quiet(EXECUTING, libc::EPERM)?];
    if !policy.opens {
        filters.push(quiet(OPENING, libc::EACCES)?);
    }
    if let Some(names) = names {
        let action = SeccompAction::Errno(libc::EACCES.unsigned_abs());
        let rules = other_names(names)?;
        filters.push(SeccompFilter::new(rules, SeccompAction::Allow, action, arch)?.try_into()?);
    }
    let listed = SeccompFilter::new(listed(policy)?, SeccompAction::Trap, SeccompAction::Allow, arch)?;
    filters.push(listed.try_into()?);
    Ok(filters)
}

/// Removals of what is at none of these addresses.
fn other_names(names: &[u64]) -> Made<Rules> {
    let mut rules = always(REMOVING);
    // All bits of an address, relative to nothing.
    let conditions =
        names.iter().map(|name| SeccompCondition::new(1, SeccompCmpArgLen::Qword, SeccompCmpOp::Ne, *name));
    if !names.is_empty() {
        let rule = SeccompRule::new(conditions.collect::<Made<_>>()?)?;
        rules.insert(Sysno::unlinkat.id().into(), vec![rule]);
    }
    Ok(rules)
}

fn listed(policy: &Policy) -> Made<Rules> {
    let mut rules = always(HARMLESS);
    rules.append(&mut always(REMOVING));
    rules.append(&mut always(OPENING));
    rules.append(&mut always(EXECUTING));
    rules.append(&mut always(&[Sysno::clone3]));
    if policy.opens {
        rules.append(&mut always(MAKING));
    } else if policy.connects_unix || policy.connects_vsock || !policy.connect.is_none() {
        rules.append(&mut always(&[Sysno::connect]));
    }
    rules.insert(Sysno::socket.id().into(), sockets(policy)?);
    let (equal, masked) = (SeccompCmpOp::Eq, SeccompCmpOp::MaskedEq);
    let mut ioctls = any(1, IOCTLS)?;
    ioctls.push(rule(&[(1, masked(0xff00), UFFDIO)])?);
    rules.insert(Sysno::ioctl.id().into(), ioctls);
    let prctls: Vec<u64> = PRCTLS.iter().map(|option| u64::from(option.unsigned_abs())).collect();
    rules.insert(Sysno::prctl.id().into(), any(0, &prctls)?);
    let namespaces = u64::from(NAMESPACES.cast_unsigned());
    rules.insert(Sysno::clone.id().into(), vec![rule(&[(0, masked(namespaces), 0)])?]);
    let own = u64::from(std::process::id());
    for call in [Sysno::kill, Sysno::tgkill] {
        rules.insert(call.id().into(), any(0, &[own])?);
    }
    // 0 is the calling process.
    for call in [Sysno::prlimit64, Sysno::sched_setaffinity, Sysno::sched_setscheduler] {
        rules.insert(call.id().into(), any(0, &[0, own])?);
    }
    let priority = |who: u64| rule(&[(0, equal.clone(), libc::PRIO_PROCESS.into()), (1, equal.clone(), who)]);
    rules.insert(Sysno::setpriority.id().into(), vec![priority(0)?, priority(own)?]);
    let signalling = SIGNALLING.map(|command| (1, SeccompCmpOp::Ne, u64::from(command.unsigned_abs())));
    rules.insert(Sysno::fcntl.id().into(), vec![rule(&signalling)?]);
    rules.append(&mut sends(policy)?);
    rules.insert(Sysno::socketpair.id().into(), pairs()?);
    for call in [Sysno::mmap, Sysno::mprotect] {
        // Plugins of the C library are code.
        let conditions = if policy.resolves {
            Vec::new()
        } else {
            vec![rule(&[(2, masked(u64::from(libc::PROT_EXEC.unsigned_abs())), 0)])?]
        };
        rules.insert(call.id().into(), conditions);
    }
    Ok(rules)
}

/// `MSG_FASTOPEN` connects by sending, and no rule for ports sees that. Where no socket can do so, or any port may be connected to,
/// the flags are not looked at, which is worth having: sends move data.
fn sends(policy: &Policy) -> Made<Rules> {
    let calls = [(Sysno::sendto, 3), (Sysno::sendmmsg, 3), (Sysno::sendmsg, 2)];
    let fast_open = u64::from(libc::MSG_FASTOPEN.unsigned_abs());
    let rules = calls.into_iter().map(|(call, flags)| {
        let conditions = match makes_tcp_sockets(policy) && policy.connect != Ports::Any {
            true => vec![rule(&[(flags, SeccompCmpOp::MaskedEq(fast_open), 0)])?],
            false => Vec::new(),
        };
        Ok((call.id().into(), conditions))
    });
    rules.collect()
}

fn makes_tcp_sockets(policy: &Policy) -> bool {
    policy.opens || !policy.connect.is_none()
}

/// Pairs of sockets: none of datagrams, one of which could send to any Unix socket by its path.
fn pairs() -> Made<Vec<SeccompRule>> {
    let number = |number: libc::c_int| u64::from(number.unsigned_abs());
    let kinds = [libc::SOCK_STREAM, libc::SOCK_SEQPACKET].map(|kind| {
        let kind = (1, SeccompCmpOp::MaskedEq(KIND), number(kind));
        rule(&[(0, SeccompCmpOp::Eq, number(libc::AF_UNIX)), kind])
    });
    kinds.into_iter().collect()
}

/// Which sockets may be made. Streams of the Internet are TCP: landlock's rules for ports know no other, such as MPTCP. One of Unix that connects to nobody is what an interface is asked through.
fn sockets(policy: &Policy) -> Made<Vec<SeccompRule>> {
    let [stream, packets, datagrams] = [libc::SOCK_STREAM, libc::SOCK_SEQPACKET, libc::SOCK_DGRAM];
    let mut kinds = vec![(libc::AF_UNIX, stream, None)];
    if policy.connects_unix {
        kinds.push((libc::AF_UNIX, packets, None));
    }
    if policy.connects_vsock {
        kinds.extend([(libc::AF_VSOCK, stream, None), (libc::AF_VSOCK, packets, None)]);
    }
    if makes_tcp_sockets(policy) {
        for protocol in [0, libc::IPPROTO_TCP] {
            kinds.extend([libc::AF_INET, libc::AF_INET6].map(|family| (family, stream, Some(protocol))));
        }
    }
    if policy.resolves {
        kinds.extend([libc::AF_INET, libc::AF_INET6, libc::AF_UNIX].map(|family| (family, datagrams, None)));
        kinds.extend([libc::SOCK_RAW, datagrams].map(|kind| (libc::AF_NETLINK, kind, None)));
    }
    let number = |number: libc::c_int| u64::from(number.unsigned_abs());
    let kinds = kinds.into_iter().map(|(family, kind, protocol)| {
        let kind = (1, SeccompCmpOp::MaskedEq(KIND), number(kind));
        let mut conditions = vec![(0, SeccompCmpOp::Eq, number(family)), kind];
        conditions.extend(protocol.map(|protocol| (2, SeccompCmpOp::Eq, number(protocol))));
        rule(&conditions)
    });
    kinds.collect()
}

fn always(calls: &[Sysno]) -> Rules {
    calls.iter().map(|call| (call.id().into(), Vec::new())).collect()
}

/// Any of these values of an argument.
fn any(argument: u8, values: &[u64]) -> Made<Vec<SeccompRule>> {
    values.iter().map(|value| rule(&[(argument, SeccompCmpOp::Eq, *value)])).collect()
}

/// All of these conditions, each on the low half of an argument, which is all that the kernel looks at in what is asked here.
fn rule(conditions: &[(u8, SeccompCmpOp, u64)]) -> Made<SeccompRule> {
    let condition = |(argument, operator, value): &(u8, SeccompCmpOp, u64)| {
        SeccompCondition::new(*argument, SeccompCmpArgLen::Dword, operator.clone(), *value)
    };
    SeccompRule::new(conditions.iter().map(condition).collect::<Made<_>>()?)
}
