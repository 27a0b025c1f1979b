//! What of a card travels with its guest, where both ends want that (`--device-state on`): whether its link is up, and what
//! it has counted. Rings and features need no state: a frontend says them anew.
//!
//! ```text
//!   "TLnet\0"  version u16  oldest u16  { tag u16  bytes u32  contents }…
//! ```
//! All little-endian. `version` is who wrote it, `oldest` the first that can read it. Each version has added a section
//! (`STAGES`): who is older leaves out what it does not know, and who is newer takes what is not there as it is in a card
//! that was just made. So a guest may go from an old host to a new one and back.

use towline_vhost_user::{BackendError, QUEUES_MAX};

use crate::statistics::{DropReason, QueueStatistics};

/// The version of the state that a card saves.
pub const STATE_VERSION: u16 = STAGES[STAGES.len() - 1].version;
/// The oldest that it loads; those that load this version's are as old.
pub const STATE_VERSION_MIN: u16 = STAGES[0].version;

const MAGIC: &[u8; 6] = b"TLnet\0";
const HEAD_BYTES: usize = 10;
const SECTION_BYTES: usize = 6;
/// `packets`, `bytes` and each [`DropReason`].
const COUNTERS: usize = 2 + DropReason::ALL.len();

/// What a version added.
struct Stage {
    version: u16,
    tag: u16,
    /// Appends the section's contents.
    save: fn(&State, &mut Vec<u8>),
    /// Takes them; false if they are none.
    load: fn(&mut State, &[u8]) -> bool,
}

const STAGES: [Stage; 2] = [
    Stage { version: 1, tag: 1, save: save_link, load: load_link },
    Stage { version: 2, tag: 2, save: save_counters, load: load_counters },
];

/// The state of a card.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct State {
    pub(crate) linked: bool,
    /// By pair: what was received and transmitted. What a ring counts is the ring's.
    pub(crate) counters: Vec<[QueueStatistics; 2]>,
}

impl Default for State {
    fn default() -> Self {
        Self { linked: true, counters: Vec::new() }
    }
}

impl State {
    pub(crate) fn encode(&self) -> Vec<u8> {
        self.encode_as(STATE_VERSION)
    }

    /// As a card of this version writes it.
    fn encode_as(&self, version: u16) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(version.to_le_bytes());
        bytes.extend(STATE_VERSION_MIN.to_le_bytes());
        for stage in STAGES.iter().filter(|stage| stage.version <= version) {
            let mut contents = Vec::new();
            (stage.save)(self, &mut contents);
            bytes.extend(stage.tag.to_le_bytes());
            bytes.extend(u32::try_from(contents.len()).expect("a few numbers for each pair").to_le_bytes());
            bytes.extend(contents);
        }
        bytes
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, BackendError> {
        Self::decode_as(bytes, STATE_VERSION)
    }

    /// As a card of this version reads it.
    fn decode_as(bytes: &[u8], known: u16) -> Result<Self, BackendError> {
        let Some((head, mut rest)) =
            bytes.split_first_chunk::<HEAD_BYTES>().filter(|_| bytes.starts_with(MAGIC))
        else {
            return Err(BackendError::new(format!("{} bytes are no state of a network card", bytes.len())));
        };
        let [version, oldest] = [6, 8].map(|at| u16::from_le_bytes([head[at], head[at + 1]]));
        if oldest > known {
            return Err(BackendError::new(format!(
                "the card's state has version {version}, which cards from version {oldest} on read, and this one knows {known}; use \
                 a newer towline here"
            )));
        }
        let mut state = Self::default();
        while let Some((head, behind)) = rest.split_first_chunk::<SECTION_BYTES>() {
            let tag = u16::from_le_bytes([head[0], head[1]]);
            let len = u32::from_le_bytes([head[2], head[3], head[4], head[5]]) as usize;
            let Some((contents, behind)) = behind.split_at_checked(len) else {
                let left = behind.len();
                return Err(BackendError::new(format!(
                    "section {tag} of the card's state has {left} bytes, not {len}"
                )));
            };
            rest = behind;
            match STAGES.iter().find(|stage| stage.tag == tag && stage.version <= known) {
                Some(stage) if (stage.load)(&mut state, contents) => {}
                None if version > known => {}
                _ => {
                    return Err(BackendError::new(format!(
                        "section {tag} of the card's state makes no sense"
                    )));
                }
            }
        }
        match rest {
            [] => Ok(state),
            _ => Err(BackendError::new(format!("{} bytes behind the card's state", rest.len()))),
        }
    }
}

fn save_link(state: &State, bytes: &mut Vec<u8>) {
    bytes.push(state.linked.into());
}

fn load_link(state: &mut State, bytes: &[u8]) -> bool {
    state.linked = bytes == [1];
    matches!(bytes, [0 | 1])
}

fn save_counters(state: &State, bytes: &mut Vec<u8>) {
    for queue in state.counters.iter().flatten() {
        let numbers = [queue.packets, queue.bytes].into_iter().chain(queue.drops);
        numbers.for_each(|number| bytes.extend(number.to_le_bytes()));
    }
}

fn load_counters(state: &mut State, bytes: &[u8]) -> bool {
    let (pairs, rest) = bytes.as_chunks::<{ 2 * COUNTERS * 8 }>();
    let queue = |bytes: &[u8]| {
        let number = |at: usize| u64::from_le_bytes(bytes[8 * at..8 * at + 8].try_into().expect("8 bytes"));
        let drops = std::array::from_fn(|reason| number(2 + reason));
        QueueStatistics { packets: number(0), bytes: number(1), drops, ..QueueStatistics::default() }
    };
    state.counters =
        pairs.iter().map(|pair| [queue(&pair[..COUNTERS * 8]), queue(&pair[COUNTERS * 8..])]).collect();
    rest.is_empty() && 2 * pairs.len() <= QUEUES_MAX
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn state() -> State {
        let queue = |packets| QueueStatistics {
            packets,
            bytes: 100 * packets,
            drops: [1, 2, 3, 4, 5, packets],
            ..QueueStatistics::default()
        };
        State { linked: false, counters: vec![[queue(7), queue(8)], [queue(9), queue(u64::MAX / 200)]] }
    }

    #[test]
    fn a_state_comes_back() {
        assert_eq!(State::decode(&state().encode()), Ok(state()));
        assert_eq!(State::decode(&State::default().encode()), Ok(State::default()));
        assert_eq!((STATE_VERSION_MIN, STATE_VERSION), (1, 2));
    }

    /// From every version to every other and back: what both know is kept, the rest is as in a new card.
    #[test]
    fn a_guest_goes_between_cards_of_all_versions() {
        let as_known = |version| match version {
            1 => State { counters: Vec::new(), ..state() },
            _ => state(),
        };
        for from in 1..=STATE_VERSION {
            for to in 1..=STATE_VERSION {
                let there = State::decode_as(&state().encode_as(from), to).unwrap();
                assert_eq!(there, as_known(from.min(to)), "{from} to {to}");
                let back = State::decode_as(&there.encode_as(to), from).unwrap();
                assert_eq!(back, as_known(from.min(to)), "{from} to {to} and back");
            }
        }
        // One that does not exist yet, with a section that nobody here knows.
        let mut newer = state().encode();
        newer[6] = 3;
        newer.extend([9, 0, 3, 0, 0, 0, 1, 2, 3]);
        assert_eq!(State::decode(&newer), Ok(state()));
        newer[8] = 3;
        let error = State::decode(&newer).unwrap_err().to_string();
        assert!(
            error.contains("version 3, which cards from version 3 on read, and this one knows 2"),
            "{error}"
        );
    }

    #[test]
    fn what_is_none_is_refused_by_name() {
        let bytes = state().encode();
        let error = |bytes: &[u8]| State::decode(bytes).unwrap_err().to_string();
        assert!(error(&bytes[..9]).contains("9 bytes are no state of a network card"));
        assert!(error(&bytes[..16]).contains("section 1 of the card's state has 0 bytes, not 1"));
        assert!(error(&[&bytes[..], &[0]].concat()).contains("1 bytes behind the card's state"));
        let mut link = bytes.clone();
        link[16] = 2;
        assert!(error(&link).contains("section 1 of the card's state makes no sense"));
        let mut tag = bytes;
        tag[10] = 7;
        assert!(error(&tag).contains("section 7 of the card's state makes no sense"));
        let many = State { counters: vec![Default::default(); QUEUES_MAX / 2 + 1], ..State::default() };
        assert!(error(&many.encode()).contains("section 2 of the card's state makes no sense"));
    }

    proptest! {
        /// Any bytes behind a right beginning: an error, or a state that is written as it was read.
        #[test]
        fn nonsense_does_no_harm(mut bytes in prop::collection::vec(prop_oneof![Just(0u8), 1..3u8, any::<u8>()], 0..400), whole: bool) {
            if whole {
                bytes.splice(0..0, [&MAGIC[..], &[2, 0, 1, 0]].concat());
            }
            if let Ok(state) = State::decode(&bytes) {
                prop_assert_eq!(State::decode(&state.encode()), Ok(state));
            }
        }
    }
}
