//! The device state's end, found backwards: on recordings, on what a guest could write, and on what only a
//! peer would.

use std::time::{Duration, Instant};

use towline_protocol::device_state::{self, Collector, DeviceState};
use towline_protocol::{Error, InvalidMessage, limits};

use crate::support::*;

/// The tail of a recording.
fn recorded(name: &str) -> DeviceState {
    match read_main(&golden(name, "main")).pop() {
        Some(Item::Complete(state)) => state,
        item => panic!("{item:?} at the end"),
    }
}

/// A device section with these contents.
pub(crate) fn section(id: u32, name: &str, contents: &[u8]) -> Vec<u8> {
    let (id, length) = (id.to_be_bytes(), [u8::try_from(name.len()).unwrap()]);
    let (instance, version) = ([0; 4], [0, 0, 0, 1]);
    [&[4], &id[..], &length, name.as_bytes(), &instance, &version, contents, &[0x7e], &id].concat()
}

/// EOF and a description that lists these devices.
pub(crate) fn description(names: &[&str]) -> Vec<u8> {
    let entry = |name: &&str| format!(r#"{{"name":"{name}","instance_id":0,"vmsd_name":"x","fields":[]}}"#);
    let entries: Vec<_> = names.iter().map(entry).collect();
    let text = format!(r#"{{"configuration":{{}},"page_size":4096,"devices":[{}]}}"#, entries.join(","));
    raw_description(text.as_bytes())
}

fn raw_description(text: &[u8]) -> Vec<u8> {
    [&[0, 6], &u32::try_from(text.len()).unwrap().to_be_bytes()[..], text].concat()
}

/// Gives `tail` in pieces of `length`; asserts that it is complete with its last byte only.
fn complete_at_the_end(tail: &[u8], length: usize) -> DeviceState {
    let mut collector = Collector::default();
    let mut state = None;
    for piece in tail.chunks(length) {
        assert_eq!(state, None, "complete at {} of {}", collector.len(), tail.len());
        collector.push(piece).unwrap();
        state = collector.complete().unwrap();
    }
    state.expect("complete with the last byte")
}

fn names(state: &DeviceState) -> Vec<&str> {
    state.devices().iter().map(|device| &device.name[..]).collect()
}

#[test]
fn recorded_states_are_complete_with_the_last_byte_in_any_pieces() {
    for name in STREAMS {
        let whole = recorded(name);
        assert!(whole.devices().len() > 20 && whole.bytes().len() > 30_000, "{name}");
        for length in [1, 2, 7, 1000, 4096, usize::MAX] {
            assert!(complete_at_the_end(whole.bytes(), length) == whole, "{name} in pieces of {length}");
        }
    }
}

#[test]
fn each_byte_belongs_to_the_device_whose_section_holds_it() {
    let state = recorded("precopy-10.0");
    let starts: Vec<_> = state.devices().iter().map(|device| device.offset).collect();
    for (index, start) in starts.iter().enumerate() {
        assert_eq!(state.device_at(*start), Some(&state.devices()[index]));
        if let Some(before) = start.checked_sub(1) {
            assert_eq!(state.device_at(before), Some(&state.devices()[index - 1]));
        }
    }
    let end = state.bytes().windows(3).rposition(|bytes| bytes == [0, 6, 0]).unwrap();
    assert_eq!(state.device_at(end - 1).unwrap().name, "globalstate");
    assert_eq!((state.device_at(end), state.device_at(state.bytes().len())), (None, None));
}

/// Twelve bytes of the section change, and nothing around them.
#[test]
fn a_paused_state_differs_in_its_run_state_only() {
    for name in ["precopy-7.2", "precopy-10.0"] {
        let before = recorded(name);
        let mut state = before.clone();
        assert_eq!(state.run_state(), Some("running"));
        state.pause();
        let changed: Vec<_> =
            (0..before.bytes().len()).filter(|&at| before.bytes()[at] != state.bytes()[at]).collect();
        let global = before.devices().iter().find(|device| device.name == "globalstate").unwrap();
        assert!(changed.iter().all(|&at| before.device_at(at) == Some(global)), "{changed:?}");
        let content = state.content(global);
        assert_eq!(content[..11], *b"\0\0\0\x07paused\0");
        assert_eq!(content.len(), before.content(global).len());
        assert!(content[11..36].iter().all(|&byte| byte == 0), "{content:?}");
        assert_eq!(DeviceState::parse(state.bytes()).unwrap(), state);
        let paused = state.clone();
        state.pause();
        assert_eq!(state, paused);
    }
}

#[test]
fn text_that_a_guest_writes_into_a_device_does_not_end_the_state() {
    let fakes = [
        description(&[]),
        description(&["timer"]),
        description(&["timer", "evil"]),
        description(&["evil"]),
        [&[0x7e, 0, 0, 0, 2][..], &description(&["timer"])].concat(),
        [&[0x7e, 0, 0, 0, 2][..], &description(&["evil"])].concat(),
        raw_description(b"{}"),
        raw_description(br#"{"devices":[]}"#),
        raw_description(br#"{"devices":[{"name":"timer"}]}"#),
        raw_description(b"{nonsense"),
        [0, 6, 0, 0, 0, 0x20, b'{'].repeat(20),
    ];
    for fake in fakes {
        let first = section(1, "timer", b"abc");
        let (contents, last) = ([&b"before"[..], &fake, b"behind"].concat(), description(&["timer", "evil"]));
        let tail = [first, section(2, "evil", &contents), last].concat();
        for length in [1, 3, 64, usize::MAX] {
            let state = complete_at_the_end(&tail, length);
            assert_eq!(names(&state), ["timer", "evil"], "{:?}", String::from_utf8_lossy(&fake));
        }
    }
}

#[test]
fn a_tail_inside_a_device_ends_the_state_only_at_the_end_of_a_read() {
    let first = section(1, "timer", b"");
    let fake = [section(2, "evil", b""), description(&["timer", "evil"])].concat();
    let tail = [first, section(2, "evil", &fake[12..]), description(&["timer", "evil"])].concat();
    assert_eq!(names(&DeviceState::parse(&tail).unwrap()), ["timer", "evil"]);
}

#[test]
fn a_description_of_other_sections_is_named_when_nothing_follows() {
    let missing = |name: &str| InvalidMessage::DeviceMissing { name: name.into(), instance: 0 };
    let truncated = InvalidMessage::Truncated { what: "the device state" };
    let two = [section(1, "a", b"x"), section(2, "b", b"y")].concat();
    let not_closed = two[..two.len() - 1].to_vec();
    for (sections, listed, error) in [
        (&two, &["a", "c"][..], missing("c")),
        (&two, &["b"], missing("b")),
        (&two, &["a"], missing("a")),
        (&two, &["b", "a"], missing("b")),
        (&two, &[], missing("")),
        (&not_closed, &["a", "b"], missing("b")),
    ] {
        let tail = [&sections[..], &description(listed)].concat();
        assert_eq!(DeviceState::parse(&tail), Err(error.into()), "{listed:?}");
    }
    assert_eq!(DeviceState::parse(&two), Err(truncated.clone().into()));
    assert_eq!(DeviceState::parse(&[]), Err(truncated.into()));
    assert_eq!(names(&DeviceState::parse(&description(&[])).unwrap()), [""; 0]);
}

#[test]
fn an_invalid_description_is_named_when_nothing_follows() {
    let long = "n".repeat(256);
    let many = vec!["a"; limits::DEVICES_MAX + 1];
    for (text, expected) in [
        (&b"{}"[..], "missing field `devices` at line 1 column 2".to_owned()),
        (b"{", "EOF while parsing an object at line 1 column 1".into()),
        (br#"{"devices":[{"name":"a"}]}"#, "missing field `instance_id` at line 1 column 24".into()),
        (
            br#"{"devices":7}"#,
            "invalid type: integer `7`, expected a list of at most 65536 devices at line 1 column 12".into(),
        ),
        (&description(&[&long])[6..], "a device name of more than 255 bytes".into()),
    ] {
        let found = DeviceState::parse(&raw_description(text));
        assert_eq!(found, Err(InvalidMessage::Description(expected).into()));
    }
    let Err(Error::Invalid(InvalidMessage::Description(text))) = DeviceState::parse(&description(&many))
    else {
        panic!("too many devices are taken")
    };
    assert!(text.starts_with("invalid length 65537, expected a list of at most 65536 devices"), "{text}");
}

#[test]
fn descriptions_without_end_are_an_error() {
    let fake = description(&[]);
    let mut collector = Collector::default();
    collector.push(&section(1, "timer", b"")).unwrap();
    for _ in 0..limits::DESCRIPTIONS_MAX {
        collector.push(&fake).unwrap();
        assert_eq!(collector.complete(), Ok(None));
    }
    collector.push(&fake).unwrap();
    let error = InvalidMessage::DeviceMissing { name: String::new(), instance: 0 };
    assert_eq!(collector.complete(), Err(error.into()));
}

#[test]
fn a_state_beyond_the_limit_is_refused() {
    let limit = limits::DEVICE_STATE_BYTES_MAX;
    let mut collector = Collector::default();
    collector.push(&vec![0; limit]).unwrap();
    assert_eq!(collector.complete(), Ok(None));
    let error =
        InvalidMessage::TooLong { what: "device state", found: limit as u64 + 1, limit: limit as u64 };
    assert_eq!(collector.push(&[0]), Err(error.into()));
}

/// The largest state made of nothing but beginnings of descriptions, which all claim to end with the last
/// byte or near it. It used to take minutes and gigabytes; the deadline is there to end the test, not to time
/// it.
#[test]
fn beginnings_of_descriptions_cost_no_more_than_their_bytes() {
    let deadline = Instant::now() + Duration::from_secs(60);
    let limit = limits::DEVICE_STATE_BYTES_MAX;
    let mut collector = Collector::default();
    let mut come = 0;
    while come + 7 * 64 < limit {
        let mut piece = Vec::new();
        for _ in 0..64 {
            let length = u32::try_from(limit - come - 6).unwrap() / 2;
            piece.extend_from_slice(&[0, 6]);
            piece.extend_from_slice(&length.to_be_bytes());
            piece.push(b'{');
            come += 7;
        }
        collector.push(&piece).unwrap();
        assert_eq!(collector.complete(), Ok(None));
        assert!(Instant::now() < deadline, "only {come} bytes within a minute");
    }
}

#[test]
fn encoded_sections_are_read_back() {
    let sections: [(&str, u32, &[u8]); 3] =
        [("cpus", 1, b"four"), ("nothing", 7, b""), ("net/0", 2, &[0x7e; 99])];
    for count in 0..=sections.len() {
        let state = DeviceState::parse(&device_state::encode(&sections[..count])).unwrap();
        let found =
            state.devices().iter().map(|device| (&device.name[..], device.version, state.content(device)));
        assert_eq!(found.collect::<Vec<_>>(), sections[..count]);
    }
}

/// `xen-save-devices-state` writes a stream's header, the sections and EOF.
#[test]
fn a_saved_state_is_described_by_the_devices_of_its_guest() {
    let known = recorded("precopy-10.0");
    let file = [&b"QEVM\0\0\0\x03"[..], known.sections(), &[0]].concat();
    let saved = DeviceState::of_saved(&file, &known).unwrap();
    assert_eq!(saved.sections(), known.sections());
    assert_eq!(saved.devices(), known.devices());
    // A device that was unplugged since is not in it.
    let few = DeviceState::parse(&device_state::encode(&[("a", 1, b"1"), ("c", 1, b"3")])).unwrap();
    let more =
        DeviceState::parse(&device_state::encode(&[("a", 1, b"0"), ("b", 1, b"2"), ("c", 1, b"0")])).unwrap();
    let file = [&b"QEVM\0\0\0\x03"[..], few.sections(), &[0]].concat();
    let saved = DeviceState::of_saved(&file, &more).unwrap();
    assert_eq!((saved.sections(), saved.devices()), (few.sections(), few.devices()));
    for wrong in [&file[..file.len() - 1], &file[..5], b"QEVM\0\0\0\x02\0", b""] {
        DeviceState::of_saved(wrong, &more).unwrap_err();
    }
}
