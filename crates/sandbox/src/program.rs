//! Puts rules with other verdicts in front of a filter, in one program.
//!
//! ```text
//!   architecture ─► calls with flags ─► calls that fail silently ─► the program of the permitted calls, which compares
//!        └──────────────────────────────────────────────────────────► one number after the other
//! ```
//! The kernel runs every filter for a call that one of them has conditions for, so each additional filter
//! costs time on the data path, and so does each comparison before the call's own.

use seccompiler::{BpfProgram, sock_filter};
use syscalls::Sysno;

/// Offsets in `struct seccomp_data`, on little-endian machines.
const NUMBER: u32 = 0;
const ARCHITECTURE: u32 = 4;
const ARGUMENTS: u32 = 16;
const ARGUMENT_BYTES: u32 = 8;
/// `linux/audit.h`.
#[cfg(target_arch = "x86_64")]
const OWN_ARCHITECTURE: u32 = 0xc000_003e;
#[cfg(target_arch = "aarch64")]
const OWN_ARCHITECTURE: u32 = 0xc000_00b7;

/// Instructions, of `linux/bpf_common.h`.
const LOAD: u16 = 0x20;
const JUMP: u16 = 0x05;
const JUMP_IF_EQUAL: u16 = 0x15;
const JUMP_IF_ANY_BIT: u16 = 0x45;
const RETURN: u16 = 0x06;

/// Calls that fail with an error number, without a report.
pub(super) struct Silent<'c> {
    pub(super) calls: &'c [Sysno],
    pub(super) errno: libc::c_int,
}

/// Verdict on a call without certain flags, which are in the low half of an argument. With any of them the
/// other rules decide.
pub(super) struct FlagRule {
    pub(super) call: Sysno,
    /// Number of the argument, from 0.
    pub(super) argument: u8,
    pub(super) flags: u32,
    pub(super) verdict: u32,
}

/// Verdict by which a call fails with an error number, without a report.
pub(super) const fn failing(errno: libc::c_int) -> u32 {
    libc::SECCOMP_RET_ERRNO | errno.unsigned_abs()
}

/// Returns a program that decides by the rules in front, and otherwise as `others` does.
pub(super) fn in_front_of(others: BpfProgram, flag_rules: &[FlagRule], silent: &[Silent<'_>]) -> BpfProgram {
    let mut rules = vec![instruction(LOAD, NUMBER)];
    // Calls with flags come first, because they are on the data path.
    for FlagRule { call, argument, flags, verdict } in flag_rules {
        rules.push(jump(JUMP_IF_EQUAL, number(*call), 0, 4));
        rules.push(instruction(LOAD, ARGUMENTS + ARGUMENT_BYTES * u32::from(*argument)));
        rules.push(jump(JUMP_IF_ANY_BIT, *flags, 1, 0));
        rules.push(instruction(RETURN, *verdict));
        rules.push(instruction(LOAD, NUMBER));
    }
    for Silent { calls, errno } in silent {
        for call in *calls {
            rules.push(jump(JUMP_IF_EQUAL, number(*call), 0, 1));
            rules.push(instruction(RETURN, failing(*errno)));
        }
    }
    let length = u32::try_from(rules.len()).expect("some calls");
    // Numbers mean other calls in another architecture, which `others` refuses.
    let mut program = vec![
        instruction(LOAD, ARCHITECTURE),
        jump(JUMP_IF_EQUAL, OWN_ARCHITECTURE, 1, 0),
        instruction(JUMP, length),
    ];
    program.extend(rules);
    program.extend(others);
    program
}

fn number(call: Sysno) -> u32 {
    call.id().unsigned_abs()
}

fn instruction(code: u16, k: u32) -> sock_filter {
    sock_filter { code, jt: 0, jf: 0, k }
}

/// A jump over this number of instructions, depending on its comparison with `k`.
fn jump(code: u16, k: u32, if_true: u8, if_false: u8) -> sock_filter {
    sock_filter { code, jt: if_true, jf: if_false, k }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::interpreter::{self, CallData};

    const REFUSED: u32 = libc::SECCOMP_RET_KILL_PROCESS;

    fn verdict(program: &[sock_filter], architecture: u32, call: Sysno, flags: u32) -> u32 {
        let arguments = [flags.into(), 0, flags.into(), 0, 0, 0];
        interpreter::verdict(program, &CallData { architecture, number: number(call), arguments })
    }

    #[test]
    fn other_rules_decide_what_is_not_in_front() {
        let silent = [
            Silent { calls: &[Sysno::clone3], errno: libc::ENOSYS },
            Silent { calls: &[Sysno::execve, Sysno::execveat], errno: libc::EPERM },
        ];
        let rule = |call, argument, flags, verdict| FlagRule { call, argument, flags, verdict };
        let flag_rules = [
            rule(Sysno::sendmsg, 2, 0x2000_0000, libc::SECCOMP_RET_ALLOW),
            rule(Sysno::clone, 0, libc::CLONE_THREAD.unsigned_abs(), failing(libc::EAGAIN)),
        ];
        let program = in_front_of(vec![instruction(RETURN, REFUSED)], &flag_rules, &silent);
        let of = |call, flags| verdict(&program, OWN_ARCHITECTURE, call, flags);
        assert_eq!(of(Sysno::sendmsg, 0x4040), libc::SECCOMP_RET_ALLOW);
        assert_eq!(of(Sysno::sendmsg, 0x2000_0040), REFUSED);
        assert_eq!(of(Sysno::clone3, 0), failing(libc::ENOSYS));
        assert_eq!(of(Sysno::clone, !libc::CLONE_THREAD.unsigned_abs()), failing(libc::EAGAIN));
        assert_eq!(of(Sysno::clone, libc::CLONE_THREAD.unsigned_abs()), REFUSED);
        assert_eq!(of(Sysno::execve, 0), failing(libc::EPERM));
        assert_eq!(of(Sysno::execveat, 0), failing(libc::EPERM));
        assert_eq!(of(Sysno::read, 0), REFUSED);
        for call in [Sysno::sendmsg, Sysno::clone3] {
            assert_eq!(verdict(&program, OWN_ARCHITECTURE ^ 1, call, 0), REFUSED, "another architecture");
        }
    }
}
