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
    let (mut at, mut accumulator) = (0, 0);
    loop {
        let sock_filter { code, jt, jf, k } = program[at];
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
            0x06 => return k,
            code => panic!("{code:#x} is not used"),
        }
    }
}

/// Returns the verdict of several programs: the strictest one, whose action is the smallest as a signed number.
pub(crate) fn strictest<'p>(programs: impl IntoIterator<Item = &'p [sock_filter]>, call: &CallData) -> u32 {
    let verdicts = programs.into_iter().map(|program| verdict(program, call));
    let action = |verdict: &u32| (verdict & 0xffff_0000).cast_signed();
    verdicts.min_by_key(action).expect("there is a program")
}
