//! State of a card that migrates with its guest if both ends have `--device-state on`: the link and the
//! counters. Rings and features are not part of it: the frontend sets them again.
//!
//! ```text
//!   "TLnet\0"  version u16  oldest u16  { tag u16  bytes u32  contents }…
//! ```
//! All little-endian. `version` is that of the writer, `oldest` the oldest that can read it. Each version
//! added a section (`SECTIONS`): an older reader skips sections that it does not know, a newer one uses the
//! defaults of a new card for sections that are missing. So a guest may move from an old host to a new one
//! and back.

use towline_vhost_user::{BackendError, QUEUES_MAX};

use crate::statistics::{DropReason, QueueStatistics};

/// Version of the state that a card saves.
pub const STATE_VERSION: u16 = SECTIONS[SECTIONS.len() - 1].version;
/// Oldest version that a card loads, and oldest that loads this version's state.
pub const STATE_VERSION_MIN: u16 = SECTIONS[0].version;

const MAGIC: &[u8; 6] = b"TLnet\0";
const HEAD_BYTES: usize = 10;
const SECTION_BYTES: usize = 6;
/// `packets`, `bytes` and each [`DropReason`].
const COUNTERS: usize = 2 + DropReason::ALL.len();

/// A section, and the version that added it.
struct Section {
    version: u16,
    tag: u16,
    /// Appends the contents.
    save: fn(&State, &mut Vec<u8>),
    /// Loads the contents. Returns false if they are invalid.
    load: fn(&mut State, &[u8]) -> bool,
}

const SECTIONS: [Section; 2] = [
    Section { version: 1, tag: 1, save: save_link, load: load_link },
    Section { version: 2, tag: 2, save: save_counters, load: load_counters },
];

/// The state of a card.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct State {
    pub(crate) link_up: bool,
    /// Counters of each pair: receiving, transmitting. Those of the rings are not included.
    pub(crate) counters: Vec<[QueueStatistics; 2]>,
}

impl Default for State {
    fn default() -> Self {
        Self { link_up: true, counters: Vec::new() }
    }
}

impl State {
    pub(crate) fn encode(&self) -> Vec<u8> {
        self.encode_as(STATE_VERSION)
    }

    /// Encodes as a card of this version does.
    fn encode_as(&self, version: u16) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(version.to_le_bytes());
        bytes.extend(STATE_VERSION_MIN.to_le_bytes());
        for section in SECTIONS.iter().filter(|section| section.version <= version) {
            let mut contents = Vec::new();
            (section.save)(self, &mut contents);
            bytes.extend(section.tag.to_le_bytes());
            bytes.extend(u32::try_from(contents.len()).expect("a few numbers for each pair").to_le_bytes());
            bytes.extend(contents);
        }
        bytes
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, BackendError> {
        Self::decode_as(bytes, STATE_VERSION)
    }

    /// Decodes as a card of version `known` does.
    fn decode_as(bytes: &[u8], known: u16) -> Result<Self, BackendError> {
        let Some((head, mut rest)) =
            bytes.split_first_chunk::<HEAD_BYTES>().filter(|_| bytes.starts_with(MAGIC))
        else {
            return Err(BackendError::new(format!(
                "{} bytes are not the state of a network card",
                bytes.len()
            )));
        };
        let [version, oldest] = [6, 8].map(|at| u16::from_le_bytes([head[at], head[at + 1]]));
        if oldest > known {
            return Err(BackendError::new(format!(
                "the card's state has version {version}, readable from version {oldest} on, this card reads version {known}; use a \
                 newer towline on this host"
            )));
        }
        let mut state = Self::default();
        while let Some((head, following)) = rest.split_first_chunk::<SECTION_BYTES>() {
            let tag = u16::from_le_bytes([head[0], head[1]]);
            let len = u32::from_le_bytes([head[2], head[3], head[4], head[5]]) as usize;
            let Some((contents, following)) = following.split_at_checked(len) else {
                let left = following.len();
                return Err(BackendError::new(format!(
                    "section {tag} of the card's state is truncated: {left} bytes, expected {len}"
                )));
            };
            rest = following;
            match SECTIONS.iter().find(|section| section.tag == tag && section.version <= known) {
                Some(section) if (section.load)(&mut state, contents) => {}
                None if version > known => {}
                _ => return Err(BackendError::new(format!("section {tag} of the card's state is invalid"))),
            }
        }
        match rest {
            [] => Ok(state),
            _ => Err(BackendError::new(format!("{} bytes follow the card's state", rest.len()))),
        }
    }
}

fn save_link(state: &State, bytes: &mut Vec<u8>) {
    bytes.push(state.link_up.into());
}

fn load_link(state: &mut State, bytes: &[u8]) -> bool {
    state.link_up = bytes == [1];
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
        State { link_up: false, counters: vec![[queue(7), queue(8)], [queue(9), queue(u64::MAX / 200)]] }
    }

    #[test]
    fn a_state_survives_encoding() {
        assert_eq!(State::decode(&state().encode()), Ok(state()));
        assert_eq!(State::decode(&State::default().encode()), Ok(State::default()));
        assert_eq!((STATE_VERSION_MIN, STATE_VERSION), (1, 2));
    }

    /// Sections that both versions know are kept, the others are those of a new card.
    #[test]
    fn a_state_migrates_between_all_versions_and_back() {
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
        // A future version with an unknown section.
        let mut newer = state().encode();
        newer[6] = 3;
        newer.extend([9, 0, 3, 0, 0, 0, 1, 2, 3]);
        assert_eq!(State::decode(&newer), Ok(state()));
        newer[8] = 3;
        let error = State::decode(&newer).unwrap_err().to_string();
        assert!(
            error.contains("version 3, readable from version 3 on, this card reads version 2"),
            "{error}"
        );
    }

    #[test]
    fn invalid_states_are_refused() {
        let bytes = state().encode();
        let error = |bytes: &[u8]| State::decode(bytes).unwrap_err().to_string();
        assert!(error(&bytes[..9]).contains("9 bytes are not the state of a network card"));
        assert!(
            error(&bytes[..16]).contains("section 1 of the card's state is truncated: 0 bytes, expected 1")
        );
        assert!(error(&[&bytes[..], &[0]].concat()).contains("1 bytes follow the card's state"));
        let mut link = bytes.clone();
        link[16] = 2;
        assert!(error(&link).contains("section 1 of the card's state is invalid"));
        let mut tag = bytes;
        tag[10] = 7;
        assert!(error(&tag).contains("section 7 of the card's state is invalid"));
        let many = State { counters: vec![Default::default(); QUEUES_MAX / 2 + 1], ..State::default() };
        assert!(error(&many.encode()).contains("section 2 of the card's state is invalid"));
    }

    proptest! {
        /// Any bytes, with or without a valid header: an error, or a state that survives encoding.
        #[test]
        fn any_bytes_are_refused_or_survive_encoding(mut bytes in prop::collection::vec(prop_oneof![Just(0u8), 1..3u8, any::<u8>()], 0..400), with_header: bool) {
            if with_header {
                bytes.splice(0..0, [&MAGIC[..], &[2, 0, 1, 0]].concat());
            }
            if let Ok(state) = State::decode(&bytes) {
                prop_assert_eq!(State::decode(&state.encode()), Ok(state));
            }
        }
    }
}
