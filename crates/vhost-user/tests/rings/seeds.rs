//! Seeds of the fuzz targets (`fuzz/seeds`): messages of a conforming frontend, and rings of a conforming
//! driver.

use std::collections::BTreeMap;
use std::path::PathBuf;

use towline_vhost_user::message::{MessageHeader, RequestCode};

use crate::driver::{Descriptor, INDIRECT, NEXT, WRITE};
use crate::harness;

/// Seeds of a target, by name.
type Seeds = BTreeMap<String, Vec<u8>>;
type Body = fn(&[u8]);

fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn encode_u32s(numbers: &[u32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
}

/// Requests of a whole session: code, number of descriptors, payload.
fn session_requests() -> Vec<(RequestCode, u8, Vec<u8>)> {
    let address = [encode_u32s(&[0, 1]), words(&[0, 160, 128, 160])].concat();
    vec![
        (RequestCode::GET_FEATURES, 0, vec![]),
        (RequestCode::GET_PROTOCOL_FEATURES, 0, vec![]),
        (RequestCode::SET_PROTOCOL_FEATURES, 0, words(&[0x9_a21f])),
        (RequestCode::GET_QUEUE_NUM, 0, vec![]),
        (RequestCode::SET_OWNER, 0, vec![]),
        (RequestCode::SET_FEATURES, 0, words(&[0x1_7000_0001])),
        (RequestCode::GET_CONFIG, 0, encode_u32s(&[0, 8, 0])),
        (RequestCode::SET_MEM_TABLE, 1, [encode_u32s(&[1, 0]), words(&[0, 0x1_0000, 0, 0])].concat()),
        (RequestCode::SET_VRING_NUM, 0, encode_u32s(&[0, 8])),
        (RequestCode::SET_VRING_BASE, 0, encode_u32s(&[0, 0])),
        (RequestCode::SET_VRING_ADDR, 0, address),
        (RequestCode::SET_VRING_CALL, 1, words(&[0])),
        (RequestCode::SET_VRING_KICK, 1, words(&[0])),
        (RequestCode::SET_VRING_ENABLE, 0, encode_u32s(&[0, 1])),
        (RequestCode::SET_LOG_BASE, 1, words(&[4096, 0])),
        (RequestCode::SET_FEATURES, 0, words(&[0x1_7400_0001])),
        (RequestCode::ADD_MEM_REG, 1, words(&[0, 0x10_0000, 0x1000, 0x10_0000, 0])),
        (RequestCode::REM_MEM_REG, 0, words(&[0, 0x10_0000, 0x1000, 0x10_0000, 0])),
        (RequestCode::GET_VRING_BASE, 0, encode_u32s(&[0, 0])),
        (RequestCode::SET_STATUS, 0, words(&[15])),
        (RequestCode::NET_SET_MTU, 0, words(&[1500])),
        (RequestCode::SEND_RARP, 0, words(&[0x5634_1200_5452])),
        (RequestCode::RESET_DEVICE, 0, vec![]),
    ]
}

fn messages() -> Seeds {
    let message = |(code, fds, payload): (RequestCode, u8, Vec<u8>)| {
        let header = MessageHeader { code, need_reply: true, length: payload.len() }.encode();
        (code.to_string(), [&[fds], &header[..], &payload].concat())
    };
    session_requests().into_iter().map(message).collect()
}

fn sessions() -> Seeds {
    let message = |(code, fds, payload): (RequestCode, u8, Vec<u8>)| {
        let head = [u8::try_from(code.0).unwrap(), 1, fds, u8::try_from(payload.len()).unwrap()];
        [&head[..], &payload].concat()
    };
    [("whole".to_owned(), session_requests().into_iter().flat_map(message).collect())].into()
}

fn rings() -> Seeds {
    let ring = |mode: u8, table: &[(u64, u32, u16, u16)]| {
        let mut memory = vec![0; 2048];
        for (at, &(address, len, flags, next)) in table.iter().enumerate() {
            let bytes = Descriptor::new(address, len, flags, next).bytes();
            memory[16 * at..][..16].copy_from_slice(&bytes);
            memory[512 + 16 * at..][..16].copy_from_slice(&bytes);
        }
        // One available entry, with head 0.
        memory[130] = 1;
        [&[mode][..], &memory].concat()
    };
    [
        (
            "chain".to_owned(),
            ring(1, &[(1024, 16, NEXT, 1), (1100, 100, NEXT | WRITE, 2), (1300, 8, WRITE, 0)]),
        ),
        ("table".to_owned(), ring(3, &[(528, 32, INDIRECT, 0), (1024, 16, NEXT, 1), (1100, 100, WRITE, 0)])),
        ("upon".to_owned(), ring(4, &[(1024, 16, WRITE, 0)])),
    ]
    .into()
}

#[test]
fn seeds_of_the_fuzz_targets_are_current() {
    let bodies: [(&str, Body, Seeds); 3] = [
        ("vhost_message", harness::message, messages()),
        ("vhost_session", harness::session, sessions()),
        ("vhost_ring", harness::ring, rings()),
    ];
    for (target, body, seeds) in bodies {
        let directory: PathBuf =
            [env!("CARGO_MANIFEST_DIR"), "..", "..", "fuzz", "seeds", target].iter().collect();
        for (name, seed) in seeds {
            body(&seed);
            let path = directory.join(name);
            if std::env::var_os("BLESS").is_some() {
                std::fs::create_dir_all(&directory).unwrap();
                std::fs::write(&path, &seed).unwrap();
            }
            assert!(std::fs::read(&path).unwrap() == seed, "{}: BLESS=1 rewrites it", path.display());
        }
    }
}
