//! Runs seccomp programs in tests, as the kernel does.

use seccompiler::sock_filter;

/// The data of a call: `struct seccomp_data` without the instruction pointer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CallData {
    pub(crate) architecture: u32,
    pub(crate) number: u32,
    pub(crate) arguments: [u64; 6],
}

impl CallData {
    /// The word at an offset of the structure.
    fn load(&self, offset: u32) -> u32 {
        let argument = |at: u32| self.arguments[at as usize / 8] >> (8 * (at % 8));
        match offset {
            0 => self.number,
            4 => self.architecture,
            16..64 if offset.is_multiple_of(4) => (argument(offset - 16) & u64::from(u32::MAX)) as u32,
            offset => panic!("{offset} is not loaded"),
        }
    }
}

/// Returns the verdict of a program.
pub(crate) fn verdict(program: &[sock_filter], call: &CallData) -> u32 {
    run(program, call, |_| ()).expect("a program ends with a verdict")
}

/// As [`verdict`], with the position of each instruction that is executed. `None` if a jump leaves the
/// program, which the kernel would not accept.
pub(crate) fn run(program: &[sock_filter], call: &CallData, mut executed: impl FnMut(usize)) -> Option<u32> {
    let (mut at, mut accumulator) = (0, 0);
    loop {
        let sock_filter { code, jt, jf, k } = *program.get(at)?;
        executed(at);
        at += 1;
        let jumps = |yes: bool| usize::from(if yes { jt } else { jf });
        // The instructions of `linux/bpf_common.h` that are used here and by `seccompiler`.
        match code {
            0x20 => accumulator = call.load(k),
            0x54 => accumulator &= k,
            0x05 => at += k as usize,
            0x15 => at += jumps(accumulator == k),
            0x25 => at += jumps(accumulator > k),
            0x35 => at += jumps(accumulator >= k),
            0x45 => at += jumps(accumulator & k != 0),
            0x06 => return Some(k),
            code => panic!("{code:#x} is not used"),
        }
    }
}

/// Returns the verdict of several programs: the strictest one, whose action is the smallest as a signed
/// number.
pub(crate) fn strictest<'p>(programs: impl IntoIterator<Item = &'p [sock_filter]>, call: &CallData) -> u32 {
    strictest_of(programs.into_iter().map(|program| verdict(program, call)))
}

/// Returns the strictest of these verdicts.
pub(crate) fn strictest_of(verdicts: impl IntoIterator<Item = u32>) -> u32 {
    let action = |verdict: &u32| (verdict & 0xffff_0000).cast_signed();
    verdicts.into_iter().min_by_key(action).expect("there is a program")
}
