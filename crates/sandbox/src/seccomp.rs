//! Seccomp: the permitted system calls.
//!
//! Some calls fail silently, with the error that the C library and this program expect of a system without
//! them; of the others the listed ones are permitted, and the rest raises SIGSYS, which is logged
//! ([`super::sys`]). For a call without conditions no filter runs: the kernel caches that it is always
//! allowed. Calls with conditions on the data path come first ([`super::program`]).

use std::collections::BTreeMap;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch, sock_filter,
};
use syscalls::Sysno;

use super::program::{self, FlagRule, Silent};
use super::{AllowedPorts, Policy, sys};
use calls::{BASIC, CREATE, EXECUTE, FCNTL_SIGNALS, IOCTLS, OPEN, PRCTLS, REMOVE, UFFDIO};

mod calls;

type Rules = BTreeMap<i64, Vec<SeccompRule>>;
type Built<T> = Result<T, seccompiler::BackendError>;

/// `clone` creates threads and no processes. It fails silently, because the C library blocks signals during
/// the call: the kernel would end the process for a report.
const THREADS_ONLY: FlagRule = FlagRule {
    call: Sysno::clone,
    argument: 0,
    flags: libc::CLONE_THREAD.unsigned_abs(),
    verdict: program::failing(libc::EPERM),
};

/// Flags that `clone` must not have: it creates no namespaces.
const NAMESPACES: libc::c_int = libc::CLONE_NEWNS
    | libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET;

/// Mask of a socket's type without its flags.
const SOCKET_TYPE: u64 = 0xf;

/// Installs a filter for all threads of the process, or for the calling one and those that it starts.
pub(super) type Install = fn(&[sock_filter]) -> Result<(), seccompiler::Error>;

/// Installs the filters. With `paths`, addresses of path names, only files at these can be removed. The error
/// describes what the kernel lacks.
pub(super) fn apply(policy: &Policy, paths: Option<&[u64]>, install: Install) -> Result<(), String> {
    let failed = |error: String| format!("seccomp: {error}; system calls are not restricted");
    let filters = filters(policy, paths).map_err(|error| failed(error.to_string()))?;
    sys::install_handler().map_err(|error| failed(error.to_string()))?;
    for filter in &filters {
        install(filter).map_err(|error| failed(error.to_string()))?;
    }
    Ok(())
}

/// Builds the filters in their order. The list of permitted calls comes last: it permits no further filter.
fn filters(policy: &Policy, paths: Option<&[u64]>) -> Built<Vec<BpfProgram>> {
    let arch = TargetArch::try_from(std::env::consts::ARCH)?;
    let mut filters = Vec::new();
    if let Some(paths) = paths {
        let action = SeccompAction::Errno(libc::EACCES.unsigned_abs());
        let rules = removal_of_other_paths(paths)?;
        filters.push(SeccompFilter::new(rules, SeccompAction::Allow, action, arch)?.try_into()?);
    }
    let listed = SeccompFilter::new(listed(policy)?, SeccompAction::Trap, SeccompAction::Allow, arch)?;
    // The flags of `clone3` are in memory, which filters cannot read; without it the C library uses `clone`.
    let silent = [
        Silent { calls: &[Sysno::clone3], errno: libc::ENOSYS },
        Silent { calls: EXECUTE, errno: libc::EPERM },
        Silent { calls: if policy.opens { &[] } else { OPEN }, errno: libc::EACCES },
    ];
    let mut flag_rules = sends(policy);
    flag_rules.push(THREADS_ONLY);
    filters.push(program::in_front_of(listed.try_into()?, &flag_rules, &silent));
    Ok(filters)
}

/// Rules that match removals except by these addresses.
fn removal_of_other_paths(paths: &[u64]) -> Built<Rules> {
    let mut rules = always(REMOVE);
    // `unlinkat(AT_FDCWD, path, 0)`: all bits of the address.
    let conditions =
        paths.iter().map(|path| SeccompCondition::new(1, SeccompCmpArgLen::Qword, SeccompCmpOp::Ne, *path));
    if !paths.is_empty() {
        let rule = SeccompRule::new(conditions.collect::<Built<_>>()?)?;
        rules.insert(Sysno::unlinkat.id().into(), vec![rule]);
    }
    Ok(rules)
}

/// Rules of the permitted calls.
fn listed(policy: &Policy) -> Built<Rules> {
    let mut rules: Rules = BASIC.iter().flat_map(|calls| always(calls)).collect();
    if !policy.opens || creates_files(policy) {
        rules.append(&mut always(REMOVE));
    }
    if policy.opens {
        rules.append(&mut always(OPEN));
        rules.append(&mut always(&[Sysno::pidfd_open]));
    }
    if creates_files(policy) {
        rules.append(&mut always(CREATE));
    }
    if policy.inspects_processes {
        rules.append(&mut always(&[Sysno::process_vm_readv]));
    }
    if policy.submits_to_rings {
        rules.append(&mut always(&[Sysno::io_uring_enter]));
    }
    if policy.opens && (listens_unix(policy) || !policy.bind.is_empty()) {
        rules.append(&mut always(&[Sysno::bind, Sysno::listen]));
    } else if policy.resolves_names {
        // Of a netlink socket, by the C library.
        rules.append(&mut always(&[Sysno::bind]));
    }
    if connects(policy) {
        rules.append(&mut always(&[Sysno::connect]));
    }
    let sockets = sockets(policy)?;
    // A call without rules is always permitted.
    if !sockets.is_empty() {
        rules.insert(Sysno::socket.id().into(), sockets);
    }
    let (equal, masked) = (SeccompCmpOp::Eq, SeccompCmpOp::MaskedEq);
    let mut ioctls = any(1, IOCTLS)?;
    ioctls.push(rule(&[(1, masked(0xff00), UFFDIO)])?);
    if policy.sets_mtu {
        ioctls.append(&mut any(1, &[libc::SIOCSIFMTU])?);
    }
    rules.insert(Sysno::ioctl.id().into(), ioctls);
    rules.insert(Sysno::prctl.id().into(), any(0, &PRCTLS.map(number))?);
    let namespaces = u64::from(NAMESPACES.cast_unsigned());
    rules.insert(Sysno::clone.id().into(), vec![rule(&[(0, masked(namespaces), 0)])?]);
    let own = u64::from(std::process::id());
    for call in [Sysno::kill, Sysno::tgkill] {
        rules.insert(call.id().into(), any(0, &[own])?);
    }
    if let Some(child) = policy.child {
        rules.insert(Sysno::kill.id().into(), any(0, &[own, child.into()])?);
        rules.insert(Sysno::wait4.id().into(), any(0, &[child.into()])?);
    }
    // 0 is the calling process.
    let scheduling =
        [Sysno::sched_setaffinity, Sysno::sched_setscheduler, Sysno::sched_setattr, Sysno::sched_getattr];
    for call in scheduling.into_iter().chain([Sysno::prlimit64]) {
        rules.insert(call.id().into(), any(0, &[0, own])?);
    }
    let priority = |who: u64| rule(&[(0, equal.clone(), libc::PRIO_PROCESS.into()), (1, equal.clone(), who)]);
    rules.insert(Sysno::setpriority.id().into(), vec![priority(0)?, priority(own)?]);
    let signalling = FCNTL_SIGNALS.map(|command| (1, SeccompCmpOp::Ne, number(command)));
    rules.insert(Sysno::fcntl.id().into(), vec![rule(&signalling)?]);
    if !checks_fast_open(policy) {
        rules.append(&mut always(&[Sysno::sendto, Sysno::sendmmsg, Sysno::sendmsg]));
    }
    rules.insert(Sysno::socketpair.id().into(), socket_pairs()?);
    for call in [Sysno::mmap, Sysno::mprotect] {
        // The C library's name service plugins are loaded as code.
        let conditions = if policy.resolves_names {
            Vec::new()
        } else {
            vec![rule(&[(2, masked(number(libc::PROT_EXEC)), 0)])?]
        };
        rules.insert(call.id().into(), conditions);
    }
    Ok(rules)
}

/// Rules for sends, where their flags are checked.
fn sends(policy: &Policy) -> Vec<FlagRule> {
    if !checks_fast_open(policy) {
        return Vec::new();
    }
    // In the order of their use by lanes.
    let calls = [(Sysno::sendmsg, 2), (Sysno::sendto, 3), (Sysno::sendmmsg, 3)];
    let (flags, verdict) = (libc::MSG_FASTOPEN.unsigned_abs(), libc::SECCOMP_RET_ALLOW);
    calls.into_iter().map(|(call, argument)| FlagRule { call, argument, flags, verdict }).collect()
}

/// `MSG_FASTOPEN` connects by sending, which landlock's rules for ports do not cover. Where no socket can do
/// so, or every port is permitted, the flags are not checked, since a check costs time on the data path.
fn checks_fast_open(policy: &Policy) -> bool {
    creates_tcp_sockets(policy) && policy.connect != AllowedPorts::Any
}

/// True for a copy that writes, but not for a command that only reads images.
fn creates_files(policy: &Policy) -> bool {
    policy.opens && !policy.write.is_empty()
}

/// True for a copy, whose private sockets are in directories that it writes.
fn listens_unix(policy: &Policy) -> bool {
    creates_files(policy) && policy.connects_unix
}

fn connects(policy: &Policy) -> bool {
    policy.connects_unix || policy.connects_vsock || policy.resolves_names || !policy.connect.is_empty()
}

/// Without a port to listen on or to connect to, a process creates none: `listen` on one without an address
/// would take a free port.
fn creates_tcp_sockets(policy: &Policy) -> bool {
    !policy.connect.is_empty() || (policy.opens && !policy.bind.is_empty())
}

/// Rules for socket pairs. Datagram sockets are refused: they could send to any Unix socket by its path.
fn socket_pairs() -> Built<Vec<SeccompRule>> {
    let kinds = [libc::SOCK_STREAM, libc::SOCK_SEQPACKET];
    kinds.into_iter().map(|kind| socket_rule(libc::AF_UNIX, kind, None)).collect()
}

/// Rules for `socket`. Internet streams are TCP only: landlock's rules for ports do not cover others, such as
/// MPTCP. Unix sockets, whose addresses neither checks, are permitted if they are connected to, or if no
/// `connect` is permitted: for the `ioctl`s of interfaces.
fn sockets(policy: &Policy) -> Built<Vec<SeccompRule>> {
    let [stream, packets, datagrams] = [libc::SOCK_STREAM, libc::SOCK_SEQPACKET, libc::SOCK_DGRAM];
    let mut kinds = Vec::new();
    // The C library asks a caching daemon for names, by a stream.
    let connects_unix = policy.connects_unix || policy.resolves_names;
    if connects_unix || !connects(policy) {
        kinds.push((libc::AF_UNIX, stream, None));
    }
    if policy.connects_unix {
        kinds.push((libc::AF_UNIX, packets, None));
    }
    if policy.connects_vsock {
        kinds.extend([(libc::AF_VSOCK, stream, None), (libc::AF_VSOCK, packets, None)]);
    }
    if creates_tcp_sockets(policy) {
        for protocol in [0, libc::IPPROTO_TCP] {
            kinds.extend([libc::AF_INET, libc::AF_INET6].map(|family| (family, stream, Some(protocol))));
        }
    }
    if policy.resolves_names {
        kinds.extend([libc::AF_INET, libc::AF_INET6, libc::AF_UNIX].map(|family| (family, datagrams, None)));
        kinds.extend([libc::SOCK_RAW, datagrams].map(|kind| (libc::AF_NETLINK, kind, None)));
    }
    kinds.into_iter().map(|(family, kind, protocol)| socket_rule(family, kind, protocol)).collect()
}

/// Rule for sockets of a family and kind, of this protocol or of any.
fn socket_rule(family: libc::c_int, kind: libc::c_int, protocol: Option<libc::c_int>) -> Built<SeccompRule> {
    let kind = (1, SeccompCmpOp::MaskedEq(SOCKET_TYPE), number(kind));
    let mut conditions = vec![(0, SeccompCmpOp::Eq, number(family)), kind];
    conditions.extend(protocol.map(|protocol| (2, SeccompCmpOp::Eq, number(protocol))));
    rule(&conditions)
}

/// A positive constant of the C library, as an argument.
fn number(constant: libc::c_int) -> u64 {
    constant.unsigned_abs().into()
}

fn always(calls: &[Sysno]) -> Rules {
    calls.iter().map(|call| (call.id().into(), Vec::new())).collect()
}

/// Rules that match any of these values of an argument.
fn any(argument: u8, values: &[u64]) -> Built<Vec<SeccompRule>> {
    values.iter().map(|value| rule(&[(argument, SeccompCmpOp::Eq, *value)])).collect()
}

/// Rule that matches all of these conditions, each on the low half of an argument, the part that these calls
/// use.
fn rule(conditions: &[(u8, SeccompCmpOp, u64)]) -> Built<SeccompRule> {
    let condition = |(argument, operator, value): &(u8, SeccompCmpOp, u64)| {
        SeccompCondition::new(*argument, SeccompCmpArgLen::Dword, operator.clone(), *value)
    };
    SeccompRule::new(conditions.iter().map(condition).collect::<Built<_>>()?)
}

#[cfg(test)]
mod tests;
