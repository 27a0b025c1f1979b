//! Tasks of participants, implemented by the real code.

use std::sync::Arc;
use std::time::Duration;

use fastrand::Rng;
use towline_channel::gather;
use towline_migration::Guest as _;
use towline_protocol::configuration::Configuration;
use towline_protocol::ram::PAGE_SIZE;
use towline_protocol::{BlockIndex, PageRef, RamBlock, device_state};

use super::super::access::Store;
use super::super::images::{IfInUse, remove_in};
use super::super::reader::StoredImage;
use super::super::upload::Upload;
use super::super::{CHUNK_BYTES, Error, Garbage, MissingChunkCause};
use super::actor::Actor;
use super::world::Role;
use crate::index::{Index, IndexContents};
use crate::{Existing, Origin};

/// Number of different pages.
const PAGES: u8 = 8;
/// Keys of the images.
const NAMES: [&str; 2] = ["a.towline", "b.towline"];

/// Task of a participant, with the maximum pause between its steps in seconds.
#[derive(Debug, Clone)]
pub(super) enum Task {
    Upload { image: usize, pages: Vec<u8>, replaces: bool, rest: f64 },
    Read { image: usize, rest: f64 },
    Collect { age_min: Duration, rest: f64 },
    Remove { image: usize, how: Removal },
}

/// Way in which an image is removed.
#[derive(Debug, Clone, Copy)]
pub(super) enum Removal {
    Refuse,
    Keep,
    /// By another program, which ignores readers.
    Foreign,
}

impl Task {
    pub(super) fn random(rng: &mut Rng) -> Self {
        let rest = [0.0, 2.0, 60.0, 1200.0, 3000.0][rng.usize(..5)];
        let image = rng.usize(..NAMES.len());
        match rng.u8(..20) {
            0..8 => {
                let pages = (0..rng.usize(1..=4)).map(|_| rng.u8(..PAGES)).collect();
                Self::Upload { image, pages, replaces: rng.u8(..4) > 0, rest }
            }
            8..12 => Self::Read { image, rest },
            12..17 => {
                let age_min = Duration::from_secs([0, 0, 0, 1800, 24 * 3600][rng.usize(..5)]);
                Self::Collect { age_min, rest }
            }
            _ => {
                let how = [Removal::Refuse, Removal::Keep, Removal::Foreign][rng.usize(..3)];
                Self::Remove { image, how }
            }
        }
    }

    /// Tasks that interfere: a slow reader, the removal of its image and a collection, in either order; or an
    /// upload that reuses garbage, and collections.
    pub(super) fn contended(rng: &mut Rng) -> Vec<Self> {
        let image = rng.usize(..NAMES.len());
        let slow = |rng: &mut Rng| [0.0, 60.0, 1200.0][rng.usize(..3)];
        let how = [Removal::Refuse, Removal::Keep, Removal::Foreign][rng.usize(..3)];
        let pages = (0..rng.usize(1..=3)).map(|_| rng.u8(4..PAGES)).collect();
        let upload = Self::Upload { image, pages, replaces: true, rest: slow(rng) };
        let collect = |rng: &mut Rng| Self::Collect { age_min: Duration::ZERO, rest: slow(rng) };
        match rng.u8(..7) {
            0 => vec![Self::Read { image, rest: 1200.0 }, upload, collect(rng)],
            1 => vec![Self::Read { image, rest: slow(rng) }, Self::Remove { image, how }, collect(rng)],
            2 => vec![upload, collect(rng)],
            3 | 4 => vec![collect(rng), upload],
            5 => vec![collect(rng), Self::Read { image, rest: 1200.0 }, Self::Remove { image, how }],
            _ => vec![upload, collect(rng), collect(rng)],
        }
    }

    pub(super) fn role(self) -> Role {
        Box::new(move |actor| match self {
            Self::Upload { image, pages, replaces, rest } => {
                let existing = if replaces { Existing::Replace } else { Existing::Refuse };
                let uploaded = upload(actor, NAMES[image], &pages, existing, rest);
                note(actor, "upload", &uploaded);
                actor.world.count(|counts| match uploaded {
                    Ok(()) => counts.published += 1,
                    Err(Error::Collecting { .. }) => counts.uploads_refused += 1,
                    Err(Error::Lost { .. }) => counts.leases_lost += 1,
                    Err(_) => {}
                });
            }
            Self::Read { image, rest } => {
                let read = read(actor, NAMES[image], rest);
                note(actor, "read", &read);
                let is_broken = matches!(read, Err(Error::Missing { .. } | Error::Damaged { .. }));
                if is_broken && !actor.has_crashed() && !actor.world.lease_expired(actor.number) {
                    actor
                        .world
                        .fail(format!("a reader with a valid lease failed: {}", read.as_ref().unwrap_err()));
                }
                if let Err(Error::Missing { absence, .. }) = &read
                    && !matches!(absence, MissingChunkCause::LeaseLost { .. })
                    && !actor.has_crashed()
                {
                    actor.world.fail(format!(
                        "the error of a reader that lost its lease does not say so: {}",
                        read.as_ref().unwrap_err()
                    ));
                }
                actor.world.count(|counts| match read {
                    Ok(()) => counts.read += 1,
                    Err(_) => counts.read_failed += 1,
                });
            }
            Self::Collect { age_min, rest } => {
                let collected = collect(actor, age_min, rest);
                note(actor, "collection", &collected);
            }
            Self::Remove { image, how } => {
                let store = actor.world.store(actor);
                let removed = match how {
                    Removal::Refuse => {
                        remove_in(&store, NAMES[image], NAMES[image], IfInUse::Refuse).map(drop)
                    }
                    Removal::Keep => {
                        remove_in(&store, NAMES[image], NAMES[image], IfInUse::KeepChunks).map(drop)
                    }
                    Removal::Foreign => store.delete(NAMES[image]),
                };
                note(actor, "removal", &removed);
            }
        })
    }
}

fn note<T>(actor: &Actor, what: &str, result: &Result<T, Error>) {
    let shown = result.as_ref().map_or_else(ToString::to_string, |_| "done".to_owned());
    actor.world.note(actor.number, || format!("{what} ends: {shown}"));
}

fn idle(actor: &Actor, most: f64) {
    actor.idle(Duration::from_secs_f64(most * fastrand::f64()));
}

fn page(page: u8) -> Vec<u8> {
    let mut bytes = vec![page + 1; PAGE_SIZE as usize];
    bytes[..8].copy_from_slice(&u64::from(page).to_le_bytes());
    bytes
}

/// Stores a guest with one block per page.
fn upload(actor: &Actor, key: &str, pages: &[u8], existing: Existing, pause: f64) -> Result<(), Error> {
    let store = actor.world.store(actor);
    let upload = Upload::begin_in(store, key.into(), key.into(), existing)?;
    let mut names = Vec::new();
    for number in pages {
        idle(actor, pause);
        names.push(vec![upload.store_chunk(Some(&page(*number)))?]);
    }
    let state = device_state::encode(&[("device", 1, &[pages.len() as u8])]);
    let device_state_names = upload.store_bytes(&state)?;
    idle(actor, pause);
    upload.flush()?;
    idle(actor, pause / 2.0);
    // The block's name is the page, for readers to compare.
    let block = |(index, number): (usize, &u8)| RamBlock {
        name: format!("{index}/{number}"),
        length: PAGE_SIZE,
        mapped: None,
    };
    let blocks: Vec<_> = pages.iter().enumerate().map(block).collect();
    let index = Index::new(IndexContents {
        configuration: &Configuration { machine_type: "pc".into(), ..Configuration::default() },
        section_id: 2,
        origin: &Origin { source: format!("actor {}", actor.number), ..Origin::default() },
        chunk_bytes: CHUNK_BYTES,
        blocks: &blocks,
        names,
        device_state: &state,
        device_state_names,
    });
    upload.publish(&index)
}

/// Reads an image block by block.
fn read(actor: &Actor, key: &str, pause: f64) -> Result<(), Error> {
    let image = StoredImage::open_in(&actor.world.store(actor), key, key)?;
    for (number, block) in image.blocks().iter().enumerate() {
        idle(actor, pause);
        let at = PageRef { block: BlockIndex(number as u32), offset: 0 };
        image.prepare_chunks(at, PAGE_SIZE)?;
        let mut bytes = vec![0; PAGE_SIZE as usize];
        gather(&[image.memory(at, PAGE_SIZE)], &mut bytes);
        let (_, expected) = block.name.split_once('/').unwrap();
        assert_eq!(bytes, page(expected.parse().unwrap()), "content of {key}, block {number}");
    }
    Ok(())
}

fn collect(actor: &Actor, age_min: Duration, pause: f64) -> Result<Garbage, Error> {
    let store: Arc<Store> = actor.world.store(actor);
    let removed = Garbage::remove_in(&store, age_min, &mut |_| {
        actor.world.count(|counts| counts.removed += 1);
        idle(actor, pause);
    });
    actor.world.count(|counts| match &removed {
        Ok(found) => {
            counts.collections += 1;
            counts.kept_for_readers += u64::from(found.kept.chunks > 0);
        }
        Err(Error::Collecting { .. } | Error::Uploading { .. }) => counts.collections_refused += 1,
        Err(Error::Lost { .. }) => counts.leases_lost += 1,
        Err(_) => {}
    });
    removed
}

/// Two images, and garbage of a third.
pub(super) fn set_up(actor: &Actor) {
    for (key, pages) in [(NAMES[0], &[0, 1, 2][..]), ("gone.towline", &[4, 5, 6]), (NAMES[1], &[2, 3])] {
        upload(actor, key, pages, Existing::Refuse, 0.0).unwrap();
    }
    actor.world.store(actor).delete("gone.towline").unwrap();
}

/// Operations that must succeed after all other actors have ended: a collection, an upload, a read.
pub(super) fn final_checks(actor: &Actor) {
    let result = collect(actor, Duration::ZERO, 0.0)
        .and_then(|_| upload(actor, NAMES[0], &[0, 7, 4], Existing::Replace, 0.0))
        .and_then(|()| read(actor, NAMES[0], 0.0))
        .and_then(|()| collect(actor, Duration::ZERO, 0.0));
    if let Err(error) = result {
        actor.world.fail(format!("after all actors have ended: {error}"));
    }
}
