//! XXH3 (64 bits, without a seed) of a page of 4 KiB, with the processor's vectors and without a copy of the page.
//!
//! Memory of a guest never becomes a slice ([`super::iobuf`]), and a library's hash takes nothing else: it would need a
//! copy of each page. Here each vector is loaded once, by a volatile read; what changes meanwhile changes the hash and
//! nothing else. The constants are those of the algorithm's specification (`xxhash_spec.md` of xxHash).

use super::iobuf::IoBuf;

/// Length of a page in bytes.
const PAGE: usize = 4096;

const STRIPE: usize = 64;
const LANES: usize = STRIPE / 8;
/// Where the secret of the final mix begins.
const MERGE_SECRET: usize = 11;

const PRIME64_1: u64 = 0x9e37_79b1_85eb_ca87;
const AVALANCHE: u64 = 0x1656_6791_9e37_79f9;

/// The default secret.
const SECRET: [u8; 192] = *b"\
    \xb8\xfe\x6c\x39\x23\xa4\x4b\xbe\x7c\x01\x81\x2c\xf7\x21\xad\x1c\xde\xd4\x6d\xe9\x83\x90\x97\xdb\
    \x72\x40\xa4\xa4\xb7\xb3\x67\x1f\xcb\x79\xe6\x4e\xcc\xc0\xe5\x78\x82\x5a\xd0\x7d\xcc\xff\x72\x21\
    \xb8\x08\x46\x74\xf7\x43\x24\x8e\xe0\x35\x90\xe6\x81\x3a\x26\x4c\x3c\x28\x52\xbb\x91\xc3\x00\xcb\
    \x88\xd0\x65\x8b\x1b\x53\x2e\xa3\x71\x64\x48\x97\xa2\x0d\xf9\x4e\x38\x19\xef\x46\xa9\xde\xac\xd8\
    \xa8\xfa\x76\x3f\xe3\x9c\x34\x3f\xf9\xdc\xbb\xc7\xc7\x0b\x4f\x1d\x8a\x51\xe0\x4b\xcd\xb4\x59\x31\
    \xc8\x9f\x7e\xc9\xd9\x78\x73\x64\xea\xc5\xac\x83\x34\xd3\xeb\xc3\xc5\x81\xa0\xff\xfa\x13\x63\xeb\
    \x17\x0d\xdd\x51\xb7\xf0\xda\x49\xd3\x16\x55\x26\x29\xd4\x68\x9e\x2b\x16\xbe\x58\x7d\x47\xa1\xfc\
    \x8f\xf8\xb8\xd1\x7a\xd0\x31\xce\x45\xcb\x3a\x8f\x95\x16\x04\x28\xaf\xd7\xfb\xca\xbb\x4b\x40\x7e";

/// Returns the XXH3 hash of a page, as `XXH3_64bits` of its 4,096 bytes, which may change meanwhile: then it is a hash of
/// some mixture. `None` where there is no code for this processor or this buffer (another length, or not aligned to
/// 64 bytes): copy it and use a library.
pub fn hash_page(page: IoBuf<'_>) -> Option<u64> {
    let start = page.iov().iov_base.cast::<u8>().cast_const();
    if page.len() != PAGE || !start.addr().is_multiple_of(STRIPE) {
        return None;
    }
    let accumulate = kernel()?;
    // SAFETY: `kernel` returns code for this processor; the page is readable (its maker's promise), aligned and whole.
    let lanes = unsafe { accumulate(start) };
    Some(merge(&lanes))
}

/// Starts to load a page into the processor's cache; a hint, without effect where the processor takes none.
pub fn prefetch_page(page: IoBuf<'_>) {
    #[cfg(target_arch = "x86_64")]
    for at in (0..page.len().min(PAGE)).step_by(STRIPE) {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        let line = page.iov().iov_base.cast::<i8>().cast_const().wrapping_add(at);
        // SAFETY: a hint about an address inside of the buffer; it reads nothing and never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(line) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = page;
}

/// Consumes the stripes of a page, which is readable and aligned to a stripe.
type Accumulate = unsafe fn(*const u8) -> [u64; LANES];

#[cfg(target_arch = "x86_64")]
fn kernel() -> Option<Accumulate> {
    if is_x86_feature_detected!("avx512f") {
        Some(x86::avx512)
    } else if is_x86_feature_detected!("avx2") {
        Some(x86::avx2)
    } else {
        None
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn kernel() -> Option<Accumulate> {
    None
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{LANES, PAGE, PRIME64_1, SECRET, STRIPE};
    use std::arch::x86_64::*;

    /// Stripes between two scrambles: each uses the secret 8 bytes behind the one before.
    const BLOCK_STRIPES: usize = (SECRET.len() - STRIPE) / 8;
    /// Where the secret of the last stripe begins.
    const LAST_SECRET: usize = SECRET.len() - STRIPE - 7;
    const PRIME32_1: u64 = 0x9e37_79b1;
    const PRIME32_2: u64 = 0x85eb_ca77;
    const PRIME32_3: u64 = 0xc2b2_ae3d;
    const PRIME64_2: u64 = 0xc2b2_ae3d_27d4_eb4f;
    const PRIME64_3: u64 = 0x1656_67b1_9e37_79f9;
    const PRIME64_4: u64 = 0x85eb_ca77_c2b2_ae63;
    const PRIME64_5: u64 = 0x27d4_eb2f_1656_67c5;

    const INITIAL: [u64; LANES] =
        [PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1];

    /// Where the secret of a scramble begins.
    const SCRAMBLE_SECRET: usize = SECRET.len() - STRIPE;
    const PAGE_STRIPES: usize = PAGE / STRIPE;

    const _: () = assert!(PAGE_STRIPES.is_multiple_of(BLOCK_STRIPES));

    /// # Safety
    /// As [`super::Accumulate`] says; the processor has AVX-512F.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn avx512(page: *const u8) -> [u64; LANES] {
        // SAFETY: 64 bytes within the secret.
        let secret = |at: usize| unsafe { _mm512_loadu_si512(SECRET[at..at + STRIPE].as_ptr().cast()) };
        let add = |sum, stripe: usize, secret| {
            // SAFETY: within the page, aligned.
            let data = unsafe { page.add(stripe * STRIPE).cast::<__m512i>().read_volatile() };
            let key = _mm512_xor_si512(data, secret);
            let product = _mm512_mul_epu32(key, _mm512_srli_epi64::<32>(key));
            _mm512_add_epi64(sum, _mm512_add_epi64(product, _mm512_shuffle_epi32::<SWAP>(data)))
        };
        let prime = _mm512_set1_epi64(PRIME32_1 as i64);
        // SAFETY: 64 bytes.
        let mut sum = unsafe { _mm512_loadu_si512(INITIAL.as_ptr().cast()) };
        for stripe in 0..PAGE_STRIPES - 1 {
            let in_block = stripe % BLOCK_STRIPES;
            sum = add(sum, stripe, secret(in_block * 8));
            if in_block == BLOCK_STRIPES - 1 {
                let mixed = _mm512_xor_si512(sum, _mm512_srli_epi64::<47>(sum));
                let mixed = _mm512_xor_si512(mixed, secret(SCRAMBLE_SECRET));
                let high = _mm512_mul_epu32(_mm512_srli_epi64::<32>(mixed), prime);
                let low = _mm512_mul_epu32(mixed, prime);
                sum = _mm512_add_epi64(low, _mm512_slli_epi64::<32>(high));
            }
        }
        sum = add(sum, PAGE_STRIPES - 1, secret(LAST_SECRET));
        let mut lanes = [0; LANES];
        // SAFETY: 64 bytes.
        unsafe { _mm512_storeu_si512(lanes.as_mut_ptr().cast(), sum) };
        lanes
    }

    /// # Safety
    /// As [`super::Accumulate`] says; the processor has AVX2.
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn avx2(page: *const u8) -> [u64; LANES] {
        const HALF: usize = STRIPE / 2;
        // SAFETY: 32 bytes within the secret.
        let secret = |at: usize| unsafe { _mm256_loadu_si256(SECRET[at..at + HALF].as_ptr().cast()) };
        let add = |sum, at: usize, secret| {
            // SAFETY: within the page, aligned.
            let data = unsafe { page.add(at).cast::<__m256i>().read_volatile() };
            let key = _mm256_xor_si256(data, secret);
            let product = _mm256_mul_epu32(key, _mm256_srli_epi64::<32>(key));
            _mm256_add_epi64(sum, _mm256_add_epi64(product, _mm256_shuffle_epi32::<SWAP>(data)))
        };
        let prime = _mm256_set1_epi64x(PRIME32_1 as i64);
        // SAFETY: 32 bytes each.
        let mut sums =
            [0, 1].map(|i| unsafe { _mm256_loadu_si256(INITIAL[4 * i..4 * i + 4].as_ptr().cast()) });
        for stripe in 0..PAGE_STRIPES - 1 {
            let in_block = stripe % BLOCK_STRIPES;
            for (i, sum) in sums.iter_mut().enumerate() {
                *sum = add(*sum, stripe * STRIPE + i * HALF, secret(in_block * 8 + i * HALF));
                if in_block == BLOCK_STRIPES - 1 {
                    let mixed = _mm256_xor_si256(*sum, _mm256_srli_epi64::<47>(*sum));
                    let mixed = _mm256_xor_si256(mixed, secret(SCRAMBLE_SECRET + i * HALF));
                    let high = _mm256_mul_epu32(_mm256_srli_epi64::<32>(mixed), prime);
                    let low = _mm256_mul_epu32(mixed, prime);
                    *sum = _mm256_add_epi64(low, _mm256_slli_epi64::<32>(high));
                }
            }
        }
        let mut lanes = [0; LANES];
        for (i, sum) in sums.into_iter().enumerate() {
            let sum = add(sum, PAGE - STRIPE + i * HALF, secret(LAST_SECRET + i * HALF));
            // SAFETY: 32 bytes each.
            unsafe { _mm256_storeu_si256(lanes[4 * i..4 * i + 4].as_mut_ptr().cast(), sum) };
        }
        lanes
    }

    /// Exchanges the two numbers of each pair.
    const SWAP: i32 = 0b01_00_11_10;
}

/// The final mix.
fn merge(lanes: &[u64; LANES]) -> u64 {
    let secret = |i: usize| {
        let at = MERGE_SECRET + 8 * i;
        u64::from_le_bytes(SECRET[at..at + 8].try_into().expect("8 bytes"))
    };
    let mut hash = (PAGE as u64).wrapping_mul(PRIME64_1);
    for i in (0..LANES).step_by(2) {
        let product = u128::from(lanes[i] ^ secret(i)) * u128::from(lanes[i + 1] ^ secret(i + 1));
        hash = hash.wrapping_add(product as u64 ^ (product >> 64) as u64);
    }
    hash ^= hash >> 37;
    hash = hash.wrapping_mul(AVALANCHE);
    hash ^ (hash >> 32)
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;
    use twox_hash::XxHash3_64;

    #[repr(align(4096))]
    struct Pages([u8; 2 * PAGE]);

    #[test]
    fn each_kernel_hashes_as_the_library() {
        let kernels: [(bool, Accumulate); 2] = [
            (is_x86_feature_detected!("avx512f"), x86::avx512),
            (is_x86_feature_detected!("avx2"), x86::avx2),
        ];
        let mut rng = fastrand::Rng::with_seed(1);
        let mut pages = Pages([0; 2 * PAGE]);
        for _ in 0..200 {
            let expected = XxHash3_64::oneshot(&pages.0[..PAGE]);
            for (_, accumulate) in kernels.iter().filter(|(is_here, _)| *is_here) {
                // SAFETY: this processor has it; the page is readable, aligned and whole.
                let lanes = unsafe { accumulate(pages.0.as_ptr()) };
                assert_eq!(merge(&lanes), expected);
            }
            assert!(hash_page(IoBuf::from(&pages.0[..PAGE])).is_none_or(|hash| hash == expected));
            rng.fill(&mut pages.0);
        }
    }

    #[test]
    fn other_buffers_are_left_to_a_library() {
        let Pages(bytes) = &Pages([1; 2 * PAGE]);
        assert_eq!(hash_page(IoBuf::from(&bytes[..PAGE - 64])), None);
        assert_eq!(hash_page(IoBuf::from(&bytes[1..=PAGE])), None);
        prefetch_page(IoBuf::from(&bytes[1..100]));
    }
}
