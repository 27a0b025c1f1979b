//! Compares the filters with a plain formulation of the same rules: a filter for each kind of verdict, of
//! which the kernel applies the strictest.

use std::collections::BTreeSet;

use seccompiler::sock_filter;

use super::*;
use crate::interpreter::{CallData, run, strictest, strictest_of, verdict};

/// Architectures of `linux/audit.h`.
const X86_64: u32 = 0xc000_003e;
const AARCH64: u32 = 0xc000_00b7;
const I386: u32 = 0x4000_0003;
const OWN: u32 = if cfg!(target_arch = "x86_64") { X86_64 } else { AARCH64 };
/// Bit of the calls of the x32 architecture, which has the same number as x86-64.
const X32: u32 = 0x4000_0000;

const PATHS: [u64; 2] = [0x7fff_1234_5678, 0x5555_0000_0010];
/// Random vectors of arguments for each call.
const VECTORS: usize = 400;

fn plain_filters(policy: &Policy, paths: Option<&[u64]>) -> Vec<BpfProgram> {
    let arch = TargetArch::try_from(std::env::consts::ARCH).unwrap();
    let filter = |rules, otherwise, matched| -> BpfProgram {
        SeccompFilter::new(rules, otherwise, matched, arch).unwrap().try_into().unwrap()
    };
    let failing = |rules, errno: libc::c_int| {
        filter(rules, SeccompAction::Allow, SeccompAction::Errno(errno.unsigned_abs()))
    };
    let mut filters =
        vec![failing(always(&[Sysno::clone3]), libc::ENOSYS), failing(always(EXECUTE), libc::EPERM)];
    if !policy.opens {
        filters.push(failing(always(OPEN), libc::EACCES));
    }
    if let Some(paths) = paths {
        filters.push(failing(removal_of_other_paths(paths).unwrap(), libc::EACCES));
    }
    let thread = u64::from(libc::CLONE_THREAD.unsigned_abs());
    let process = rule(&[(0, SeccompCmpOp::MaskedEq(thread), 0)]).unwrap();
    filters.push(failing(Rules::from([(Sysno::clone.id().into(), vec![process.clone()])]), libc::EPERM));
    let mut rules = listed(policy).unwrap();
    rules.entry(Sysno::clone.id().into()).or_default().push(process);
    rules.append(&mut always(OPEN));
    rules.append(&mut always(EXECUTE));
    rules.append(&mut always(&[Sysno::clone3]));
    let fast_open = u64::from(libc::MSG_FASTOPEN.unsigned_abs());
    for (call, flags) in [(Sysno::sendto, 3), (Sysno::sendmmsg, 3), (Sysno::sendmsg, 2)] {
        let unflagged = rule(&[(flags, SeccompCmpOp::MaskedEq(fast_open), 0)]).unwrap();
        let listens = policy.opens && !policy.bind.is_empty();
        let is_checked = (listens || !policy.connect.is_empty()) && policy.connect != AllowedPorts::Any;
        rules.insert(call.id().into(), if is_checked { vec![unflagged] } else { Vec::new() });
    }
    filters.push(filter(rules, SeccompAction::Trap, SeccompAction::Allow));
    filters
}

fn policies() -> Vec<Policy> {
    let device = Policy::default();
    let reader = Policy { opens: true, ..device.clone() };
    let copy = Policy { write: vec!["/tmp".into()], connects_unix: true, ..reader.clone() };
    vec![
        reader,
        Policy { connects_vsock: true, ..device.clone() },
        Policy { connects_unix: true, connects_vsock: true, ..device.clone() },
        Policy { connect: AllowedPorts::Only(vec![22]), ..device.clone() },
        Policy { connect: AllowedPorts::Any, ..device.clone() },
        Policy { sets_mtu: true, ..device.clone() },
        Policy { submits_to_rings: true, ..device.clone() },
        Policy { connect: AllowedPorts::Only(vec![22]), resolves_names: true, ..copy.clone() },
        Policy { connect: AllowedPorts::Any, ..copy.clone() },
        Policy { bind: AllowedPorts::Only(vec![22]), ..copy.clone() },
        device,
        copy,
    ]
}

/// Values that some rule compares an argument with, and values beside them.
fn values(programs: &[BpfProgram]) -> Vec<u64> {
    let compared =
        programs.iter().flatten().filter(|instruction| matches!(instruction.code, 0x15 | 0x45 | 0x54));
    let mut values: BTreeSet<u64> = compared.map(|instruction| u64::from(instruction.k)).collect();
    values.extend(PATHS);
    values.insert(u64::from((libc::CLONE_THREAD | libc::CLONE_NEWUSER).unsigned_abs()));
    values.extend([0, 1, 1 << 29, (1 << 29) | 0x4040, 1 << 32, (1 << 32) | (1 << 29), u64::MAX]);
    values.into_iter().collect()
}

/// A small generator (splitmix64).
fn random(state: &mut u64) -> usize {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mixed = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    usize::try_from((mixed ^ (mixed >> 27)) >> 33).unwrap()
}

/// Calls of all numbers and architectures, and with arguments that some rule compares.
fn calls(policy: &Policy, plain: &[BpfProgram], state: &mut u64) -> Vec<CallData> {
    let numbers = (0..700).flat_map(|number| [number, X32 | number]).chain([u32::MAX, u32::MAX >> 1]);
    let each = |number| {
        let of = move |architecture, argument| CallData { architecture, number, arguments: [argument; 6] };
        [X86_64, AARCH64, I386, 0].into_iter().flat_map(move |own| [of(own, 0), of(own, u64::MAX)])
    };
    let mut calls: Vec<CallData> = numbers.flat_map(each).collect();
    // Calls whose arguments are compared, and the sends.
    let values = values(plain);
    let compared = listed(policy).unwrap().into_iter().filter(|(_, rules)| !rules.is_empty());
    let compared = compared.map(|(call, _)| call).chain(always(REMOVE).into_keys());
    let sends = [Sysno::sendto, Sysno::sendmmsg, Sysno::sendmsg].map(|call| i64::from(call.id()));
    for call in compared.chain(sends) {
        let number = u32::try_from(call).unwrap();
        for _ in 0..VECTORS {
            let arguments = [(); 6].map(|()| values[random(state) % values.len()]);
            calls.push(CallData { architecture: OWN, number, arguments });
        }
        for (at, value) in (0..6).flat_map(|at| values.iter().map(move |value| (at, *value))) {
            let mut arguments = [0; 6];
            arguments[at] = value;
            calls.push(CallData { architecture: OWN, number, arguments });
        }
    }
    // Conditions on several arguments: the kinds of sockets, and the priorities of processes.
    let [families, protocols] = [&[0, 1, 2, 3, 10, 16, 40][..], &[0, 1, 6]];
    for call in [Sysno::socket, Sysno::socketpair, Sysno::setpriority] {
        for (family, kind) in families.iter().flat_map(|family| (0..6).map(move |kind| (*family, kind))) {
            let number = u32::try_from(call.id()).unwrap();
            let of = |protocol: &u64| [family, kind, *protocol, 0, 0, 0];
            let all = protocols.iter().map(of);
            calls.extend(all.map(|arguments| CallData { architecture: OWN, number, arguments }));
        }
    }
    calls
}

/// Returns true if a policy permits a call with these arguments.
fn permits(policy: &Policy, call: Sysno, arguments: [u64; 3]) -> bool {
    let [first, second, third] = arguments;
    let arguments = [first, second, third, 0, 0, 0];
    let call = CallData { architecture: OWN, number: call.id().unsigned_abs(), arguments };
    let filters = filters(policy, None).unwrap();
    strictest(filters.iter().map(Vec::as_slice), &call) == libc::SECCOMP_RET_ALLOW
}

#[test]
fn the_mtu_is_set_only_by_a_policy_that_says_so() {
    let sets = |policy: &Policy| permits(policy, Sysno::ioctl, [3, libc::SIOCSIFMTU, 0]);
    assert!(sets(&Policy { sets_mtu: true, ..Policy::default() }));
    assert!(!sets(&Policy::default()));
}

#[test]
fn no_policy_creates_an_io_uring() {
    let enters = |policy: &Policy| permits(policy, Sysno::io_uring_enter, [3, 0, 0]);
    assert!(enters(&Policy { submits_to_rings: true, ..Policy::default() }));
    assert!(!enters(&Policy::default()));
    for policy in policies() {
        let creates = [Sysno::io_uring_setup, Sysno::io_uring_register];
        assert!(creates.into_iter().all(|call| !permits(&policy, call, [3, 0, 0])), "{policy:?}");
    }
}

#[test]
fn unix_sockets_are_created_where_they_are_connected_to_or_nothing_is() {
    let [unix, stream] = [libc::AF_UNIX, libc::SOCK_STREAM].map(|number| u64::from(number.unsigned_abs()));
    let creates = |policy: &Policy| permits(policy, Sysno::socket, [unix, stream, 0]);
    let device = Policy::default();
    assert!(creates(&device) && creates(&Policy { connects_unix: true, ..device.clone() }));
    for policy in [
        Policy { connect: AllowedPorts::Only(vec![22]), ..device.clone() },
        Policy { connect: AllowedPorts::Any, ..device.clone() },
        Policy { connects_vsock: true, ..device.clone() },
    ] {
        assert!(!creates(&policy), "{policy:?}");
    }
}

#[test]
fn tcp_sockets_are_created_only_with_a_port_to_listen_on_or_to_connect_to() {
    let creates = |policy: &Policy| {
        let [stream, inet, inet6] =
            [libc::SOCK_STREAM, libc::AF_INET, libc::AF_INET6].map(|number| u64::from(number.unsigned_abs()));
        let created = [inet, inet6].map(|family| permits(policy, Sysno::socket, [family, stream, 0]));
        assert_eq!(created[0], created[1]);
        created[0]
    };
    let device = Policy::default();
    let copy = Policy { opens: true, write: vec!["/tmp".into()], connects_unix: true, ..device.clone() };
    let port = AllowedPorts::Only(vec![22]);
    for policy in [&device, &copy, &Policy { bind: port.clone(), ..device.clone() }] {
        assert!(!creates(policy), "{policy:?}");
    }
    for policy in [
        Policy { bind: port.clone(), ..copy.clone() },
        Policy { bind: AllowedPorts::Any, ..copy.clone() },
        Policy { connect: port.clone(), ..copy },
        Policy { connect: port, ..device },
    ] {
        assert!(creates(&policy), "{policy:?}");
    }
}

#[test]
fn a_command_that_reads_images_neither_connects_nor_listens_nor_changes_files() {
    let reader = Policy { opens: true, read: vec!["/".into()], ..Policy::default() };
    let copy = Policy { write: vec!["/tmp".into()], connects_unix: true, ..reader.clone() };
    let page = Policy { connects_unix: false, ..copy.clone() };
    let files = [Sysno::renameat2, Sysno::linkat, Sysno::mkdirat, Sysno::unlinkat];
    for call in files {
        assert!(permits(&copy, call, [0; 3]) && permits(&page, call, [0; 3]), "{call}");
        assert!(!permits(&reader, call, [0; 3]), "{call}");
    }
    for call in [Sysno::connect, Sysno::bind, Sysno::listen] {
        assert!(permits(&copy, call, [0; 3]), "{call}");
        assert!(!permits(&reader, call, [0; 3]) && !permits(&page, call, [0; 3]), "{call}");
    }
}

#[test]
fn one_program_decides_as_separate_filters_do() {
    let (mut found, mut compared, mut state) = (BTreeSet::new(), 0_u64, 1);
    let paths: [Option<&[u64]>; 3] = [None, Some(&[]), Some(&PATHS)];
    for (policy, paths) in policies().iter().zip(paths.into_iter().cycle()) {
        let (filters, plain) = (filters(policy, paths).unwrap(), plain_filters(policy, paths));
        for call in calls(policy, &plain, &mut state) {
            let decided = strictest(filters.iter().map(Vec::as_slice), &call);
            let expected = strictest(plain.iter().map(Vec::as_slice), &call);
            assert_eq!(decided, expected, "{call:x?} with {policy:?}, {paths:?}");
            found.insert((call.architecture == OWN, decided));
            compared += 1;
        }
    }
    let failing = |errno: libc::c_int| libc::SECCOMP_RET_ERRNO | errno.unsigned_abs();
    let verdicts = [libc::SECCOMP_RET_ALLOW, libc::SECCOMP_RET_TRAP];
    let verdicts = verdicts.into_iter().chain([libc::ENOSYS, libc::EPERM, libc::EACCES].map(failing));
    let mut expected: BTreeSet<_> = verdicts.map(|verdict| (true, verdict)).collect();
    expected.insert((false, libc::SECCOMP_RET_KILL_PROCESS));
    assert_eq!(found, expected, "after {compared} comparisons");
}

/// Returns an instruction with one fault each: another verdict, the targets of a jump exchanged, another
/// value compared.
fn faults(instruction: &sock_filter) -> Vec<sock_filter> {
    let sock_filter { code, jt, jf, k } = *instruction;
    let with = |jt, jf, k| sock_filter { code, jt, jf, k };
    match code {
        0x06 if k == libc::SECCOMP_RET_ALLOW => vec![with(0, 0, libc::SECCOMP_RET_TRAP)],
        0x06 => vec![with(0, 0, libc::SECCOMP_RET_ALLOW)],
        0x15 | 0x25 | 0x35 | 0x45 => vec![with(jf, jt, k), with(jt, jf, k ^ 1)],
        _ => Vec::new(),
    }
}

/// The comparison above is worth something: it finds each single fault in the programs of a device and of a
/// copy.
#[test]
fn the_comparison_finds_every_fault_in_a_program() {
    let (mut state, mut count, mut missed) = (1, 0, Vec::new());
    let (only, both) = (AllowedPorts::Only(vec![22]), Some(&PATHS[..]));
    let device = Policy { connect: only.clone(), connects_unix: true, ..Policy::default() };
    let copy = Policy { opens: true, connect: only, resolves_names: true, ..Policy::default() };
    for (policy, paths) in [(device, both), (copy, None)] {
        let (filters, plain) = (filters(&policy, paths).unwrap(), plain_filters(&policy, paths));
        let calls = calls(&policy, &plain, &mut state);
        let expected: Vec<u32> =
            calls.iter().map(|call| strictest(plain.iter().map(Vec::as_slice), call)).collect();
        for (changed, program) in filters.iter().enumerate() {
            // Only the calls that execute an instruction can find its faults.
            let mut executing = vec![Vec::new(); program.len()];
            for (index, call) in calls.iter().enumerate() {
                run(program, call, |at| executing[at].push(index));
            }
            for (at, instruction) in program.iter().enumerate().filter(|(at, _)| !executing[*at].is_empty()) {
                let others = |call: &CallData| {
                    let others = filters.iter().enumerate().filter(|(index, _)| *index != changed);
                    others.map(|(_, program)| verdict(program, call)).collect::<Vec<u32>>()
                };
                // Another program refuses a foreign architecture too.
                let is_alone = |index: &usize| {
                    let others = others(&calls[*index]);
                    others.is_empty() || strictest_of(others) != expected[*index]
                };
                if !executing[at].iter().any(is_alone) {
                    continue;
                }
                for fault in faults(instruction) {
                    let mut faulty = program.clone();
                    faulty[at] = fault.clone();
                    let decides = |call| {
                        let own = run(&faulty, call, |_| ())?;
                        Some(strictest_of(others(call).into_iter().chain([own])))
                    };
                    let is_found =
                        executing[at].iter().any(|index| decides(&calls[*index]) != Some(expected[*index]));
                    count += 1;
                    if !is_found {
                        missed.push(format!("{changed}.{at}: {instruction:?} as {fault:?}"));
                    }
                }
            }
        }
    }
    assert!(missed.is_empty(), "{} of {count} faults: {missed:#?}", missed.len());
}
