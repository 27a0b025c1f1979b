//! The decoder, fed in any pieces, by friend and foe.

#![allow(clippy::unwrap_used, reason = "the exemption for tests does not reach their helpers")]

use proptest::collection::vec;
use proptest::prelude::*;
use serde_json::{Map, Value, json};
use towline_qmp::codec::{CodecError, DEPTH_MAX, Decoder, MESSAGE_BYTES_MAX};
use towline_qmp::{Event, Greeting, Message};

fn value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        "[ -~\n\"\\\\{}\\[\\]é☃]{0,12}".prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 24, 4, |inner| {
        prop_oneof![vec(inner.clone(), 0..4).prop_map(Value::from), object(inner).prop_map(Value::from)]
    })
}

fn object(inner: impl Strategy<Value = Value>) -> impl Strategy<Value = Map<String, Value>> {
    // Keys that no message of QMP has.
    vec(("x-[ -~]{0,6}", inner), 0..4).prop_map(Map::from_iter)
}

fn message() -> impl Strategy<Value = (Value, Message)> {
    let id = || proptest::option::of(value());
    prop_oneof![
        (id(), value(), object(value())).prop_map(|(id, value, other)| {
            let mut json = json!({ "return": value });
            extend(&mut json, id.as_ref(), &other);
            (json, Message::Return { id, value, other })
        }),
        (id(), "[A-Z]{1,9}", "[ -~]{0,30}", object(value())).prop_map(|(id, class, desc, other)| {
            let mut json = json!({ "error": { "class": class, "desc": desc } });
            extend(&mut json, id.as_ref(), &other);
            (json, Message::Error { id, class, desc, other })
        }),
        ("[A-Z_]{1,9}", object(value()), any::<(i64, i64)>(), object(value())).prop_map(
            |(name, data, time, other)| {
                let timestamp = json!({ "seconds": time.0, "microseconds": time.1 });
                let mut json = json!({ "event": name, "data": data, "timestamp": timestamp });
                extend(&mut json, None, &other);
                let timestamp = serde_json::from_value(timestamp).unwrap();
                (json, Message::Event(Event { name, data, timestamp, other }))
            }
        ),
        (value(), vec(value(), 0..3), object(value())).prop_map(|(version, capabilities, other)| {
            let mut greeting = json!({ "version": version, "capabilities": capabilities });
            extend(&mut greeting, None, &other);
            (json!({ "QMP": greeting }), Message::Greeting(Greeting { version, capabilities, other }))
        }),
        object(value()).prop_map(|other| (Value::from(other.clone()), Message::Other(other))),
    ]
}

fn extend(json: &mut Value, id: Option<&Value>, other: &Map<String, Value>) {
    let json = json.as_object_mut().unwrap();
    json.extend(id.map(|id| ("id".to_owned(), id.clone())));
    json.extend(other.clone());
}

/// Feeds `bytes` in pieces of these sizes, over and over.
fn decode(bytes: &[u8], pieces: &[usize]) -> (Vec<Message>, Option<CodecError>) {
    let mut decoder = Decoder::new();
    let mut messages = Vec::new();
    let mut rest = bytes;
    for piece in pieces.iter().cycle() {
        let (now, later) = rest.split_at((*piece).min(rest.len()));
        decoder.feed(now);
        loop {
            match decoder.next_message() {
                Ok(Some(message)) => messages.push(message),
                Ok(None) => break,
                Err(error) => {
                    assert_eq!(decoder.next_message(), Err(error.clone()), "an error stays");
                    return (messages, Some(error));
                }
            }
        }
        rest = later;
        if rest.is_empty() {
            break;
        }
    }
    (messages, None)
}

proptest! {
    #[test]
    fn any_split_decodes_equally(
        messages in vec((message(), any::<bool>(), "[ \r\n\t]{0,3}"), 0..6),
        pieces in vec(1_usize..40, 1..8),
    ) {
        let mut bytes = Vec::new();
        for ((json, _), pretty, space) in &messages {
            let text = if *pretty { serde_json::to_string_pretty(json) } else { serde_json::to_string(json) };
            bytes.extend_from_slice(text.unwrap().as_bytes());
            bytes.extend_from_slice(space.as_bytes());
        }
        let expected: Vec<_> = messages.into_iter().map(|((_, message), ..)| message).collect();
        prop_assert_eq!(decode(&bytes, &pieces), (expected.clone(), None));
        prop_assert_eq!(decode(&bytes, &[1]), (expected.clone(), None));
        prop_assert_eq!(decode(&bytes, &[usize::MAX]), (expected, None));
    }

    #[test]
    fn a_hostile_peer_never_panics_it(bytes in vec(any::<u8>(), 0..200), pieces in vec(1_usize..40, 1..8)) {
        let _ = decode(&bytes, &pieces);
    }

    #[test]
    fn nearly_json_decodes_equally_in_any_split(
        text in vec("[{}\\[\\],:\"\\\\]|\"event\":|\"return\":|\"error\":|\"QMP\":|1e9|\\u00e9|\"a\"", 0..40),
        pieces in vec(1_usize..9, 1..8),
    ) {
        let bytes = text.concat().into_bytes();
        let (messages, error) = decode(&bytes, &pieces);
        let (whole, whole_error) = decode(&bytes, &[usize::MAX]);
        prop_assert_eq!(messages, whole);
        // The excerpt shows what has arrived, so it depends on the split; the kind does not.
        let kind = |error: Option<CodecError>| error.map(|error| std::mem::discriminant(&error));
        prop_assert_eq!(kind(error), kind(whole_error));
    }
}

#[test]
fn a_message_is_bounded_in_length() {
    let open = b"{\"return\": \"";
    let fits = [open, vec![b'a'; MESSAGE_BYTES_MAX - open.len() - 2].as_slice(), b"\"}"].concat();
    assert_eq!(fits.len(), MESSAGE_BYTES_MAX);
    let (messages, error) = decode(&fits, &[64 << 10]);
    assert_eq!((messages.len(), error), (1, None));

    let too_long = [open, vec![b'a'; MESSAGE_BYTES_MAX].as_slice()].concat();
    let excerpt = format!("{{\\\"return\\\": \\\"{}…", "a".repeat(68));
    assert_eq!(
        decode(&too_long, &[64 << 10]),
        (vec![], Some(CodecError::TooLong { bytes_max: MESSAGE_BYTES_MAX, excerpt }))
    );
}

#[test]
fn a_message_is_bounded_in_depth() {
    let nested = |depth: usize| format!("{{\"return\":{}{}}}", "[".repeat(depth - 1), "]".repeat(depth - 1));
    let (messages, error) = decode(nested(DEPTH_MAX).as_bytes(), &[7]);
    assert_eq!((messages.len(), error), (1, None));
    let (messages, error) = decode(nested(DEPTH_MAX + 1).as_bytes(), &[1000]);
    assert!(matches!((messages.len(), error), (0, Some(CodecError::TooDeep { .. }))));
}

#[test]
fn an_error_shows_what_it_found() {
    let prompt = b"QEMU 10.0.2 monitor - type 'help' for more information\r\n(qemu) ";
    let excerpt = "QEMU 10.0.2 monitor - type \\'help\\' for more information\\r\\n(qemu) ".to_owned();
    assert_eq!(decode(prompt, &[usize::MAX]), (vec![], Some(CodecError::NotJson { excerpt })));

    let (_, error) = decode(b"{\"event\": 5}", &[3]);
    let reason = "invalid type: integer `5`, expected a string".to_owned();
    let excerpt = "{\\\"event\\\": 5}".to_owned();
    assert_eq!(error, Some(CodecError::Malformed { reason, excerpt }));
}
