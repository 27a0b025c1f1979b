//! Tests if memory that may change at any time is zero.
//!
//! ```text
//!   page   [line 0][line 1][line 2] …      64 bytes at once; the first line that is not zero ends the search
//! ```
//!
//! The loads are volatile, so each is made once, in place. The view of memory that is being written is a
//! mixture; a dirty tracker reports the write.

/// Bytes examined between two decisions.
const LINE_BYTES: usize = 64;

/// Returns true if `length` bytes from `start` on are zero now.
///
/// # Safety
/// The bytes are mapped and readable, `start` is a multiple of 64 and so is `length`.
pub(super) unsafe fn is_zero(start: *const u8, length: usize) -> bool {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the CPU has AVX2, and the caller vouches for the memory.
        return unsafe { is_zero_avx2(start, length) };
    }
    // SAFETY: the caller vouches for the memory.
    unsafe { is_zero_portable(start, length) }
}

/// # Safety
/// As [`is_zero`], on a CPU with AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn is_zero_avx2(start: *const u8, length: usize) -> bool {
    use std::arch::x86_64::{__m256i, _mm256_or_si256, _mm256_testz_si256};
    for line in (0..length).step_by(LINE_BYTES) {
        // SAFETY: a line lies within the memory that the caller vouches for, and both halves are aligned.
        let (low, high) = unsafe {
            let line = start.add(line).cast::<__m256i>();
            (line.read_volatile(), line.add(1).read_volatile())
        };
        let bits = _mm256_or_si256(low, high);
        if _mm256_testz_si256(bits, bits) == 0 {
            return false;
        }
    }
    true
}

/// # Safety
/// As [`is_zero`].
unsafe fn is_zero_portable(start: *const u8, length: usize) -> bool {
    for line in (0..length).step_by(LINE_BYTES) {
        // SAFETY: a line lies within the memory that the caller vouches for, and is aligned for its words.
        let bits = unsafe {
            let line = start.add(line).cast::<u64>();
            (0..LINE_BYTES / 8).fold(0, |bits, word| bits | line.add(word).read_volatile())
        };
        if bits != 0 {
            return false;
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use memmap2::MmapMut;

    use super::*;

    const PAGE: usize = 4096;

    /// Every implementation that runs here, on the same page.
    fn verdicts(page: &[u8]) -> Vec<bool> {
        assert_eq!(page.as_ptr().align_offset(LINE_BYTES), 0);
        // SAFETY: a slice of whole, aligned lines that is not written.
        let mut verdicts =
            unsafe { vec![is_zero(page.as_ptr(), PAGE), is_zero_portable(page.as_ptr(), PAGE)] };
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") {
            // SAFETY: as above, and the CPU has AVX2.
            verdicts.push(unsafe { is_zero_avx2(page.as_ptr(), PAGE) });
        }
        verdicts
    }

    #[test]
    fn one_set_bit_is_seen_wherever_it_is() {
        let mut page = MmapMut::map_anon(PAGE).unwrap();
        let page = &mut page[..];
        assert!(verdicts(page).iter().all(|&zero| zero));
        for bit in 0..8 * PAGE {
            page[bit / 8] = 1 << (bit % 8);
            assert!(verdicts(page).iter().all(|&zero| !zero), "bit {bit}");
            page[bit / 8] = 0;
        }
        assert!(verdicts(page).iter().all(|&zero| zero));
    }

    #[test]
    fn all_agree_with_the_naive_way() {
        let mut rng = fastrand::Rng::with_seed(7);
        let mut mapping = MmapMut::map_anon(PAGE).unwrap();
        for _ in 0..2000 {
            let page = &mut mapping[..];
            page.fill(0);
            for _ in 0..rng.usize(0..3) {
                page[rng.usize(0..PAGE)] = rng.u8(..);
            }
            let naive = page.iter().all(|&byte| byte == 0);
            assert!(verdicts(page).iter().all(|&zero| zero == naive));
        }
    }
}
