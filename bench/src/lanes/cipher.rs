//! The cipher of TLS lanes alone: the limit of their rate.

use std::time::Instant;

use anyhow::{Result, anyhow};
use aws_lc_rs::aead::{AES_128_GCM, Aad, LessSafeKey, Nonce, UnboundKey};

use super::transfer::Cost;
use crate::machine::{self, at_once};

/// Contents of a TLS record.
const RECORD_BYTES: usize = 16 << 10;

/// Seals and opens `bytes` in records, with a thread of each kind for each lane. Records stay in the caches, and none is sent.
pub(super) fn run(lanes: usize, bytes: u64) -> Result<Cost> {
    let records = bytes / RECORD_BYTES as u64 / lanes as u64;
    let (started, cpu_before) = (Instant::now(), machine::own_seconds());
    let works = (0..lanes).flat_map(|_| [seal as fn(u64) -> Result<()>, open]);
    at_once(works.map(|work| move || work(records)))?;
    Ok(Cost {
        seconds: started.elapsed().as_secs_f64(),
        cpu_seconds: machine::own_seconds() - cpu_before,
        bytes: (records * lanes as u64) as f64 * RECORD_BYTES as f64,
    })
}

fn seal(records: u64) -> Result<()> {
    let (key, mut record) = (key()?, vec![1; RECORD_BYTES]);
    for _ in 0..records {
        let tag = key.seal_in_place_separate_tag(nonce(), Aad::empty(), &mut record).map_err(failed)?;
        let _ = std::hint::black_box(tag);
    }
    Ok(())
}

fn open(records: u64) -> Result<()> {
    let (key, mut record, mut contents) = (key()?, vec![2; RECORD_BYTES], vec![0; RECORD_BYTES]);
    let tag = key.seal_in_place_separate_tag(nonce(), Aad::empty(), &mut record).map_err(failed)?;
    for _ in 0..records {
        key.open_separate_gather(nonce(), Aad::empty(), &record, tag.as_ref(), &mut contents)
            .map_err(failed)?;
    }
    Ok(())
}

fn key() -> Result<LessSafeKey> {
    Ok(LessSafeKey::new(UnboundKey::new(&AES_128_GCM, &[7; 16]).map_err(failed)?))
}

/// Returns the same one each time, as nothing is sent.
fn nonce() -> Nonce {
    Nonce::assume_unique_for_key([9; 12])
}

fn failed(_: aws_lc_rs::error::Unspecified) -> anyhow::Error {
    anyhow!("AES-128-GCM of aws-lc failed")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_records_are_counted() {
        let cost = run(2, 64 << 20).unwrap();
        assert_eq!(cost.bytes, f64::from(64 << 20));
        assert!(cost.cpu_seconds > 0.0 && cost.seconds > 0.0);
    }
}
