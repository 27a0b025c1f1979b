//! Bodies of the fuzz targets, and short runs of them.
#![allow(dead_code, unreachable_pub, reason = "each target uses one of them")]

use std::fs::File;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::rc::Rc;
use std::sync::Arc;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use towline_frontend::GUEST_BASE;
use towline_vhost_user::log::LogSwitch;
use towline_vhost_user::message::{
    HEADER_BYTES, MessageHeader, RegionInfo, Request, RequestCode, VringAddress,
};
use towline_vhost_user::{
    BackendError, Batch, Cancel, Device, GuestMemory, Next, Queues, Region, Ring, RingSetup, Worker,
    features, serve,
};

/// Maximum number of chains that one input may cause.
const CHAINS_MAX: usize = 256;
const RING_BYTES: usize = 4096;

fn file(bytes: u64) -> File {
    let fd = memfd_create("fuzz", MemfdFlags::CLOEXEC).expect("a memfd");
    ftruncate(&fd, bytes).expect("space for it");
    fd.into()
}

/// One message: a byte with the number of descriptors, then header and payload.
pub fn message(data: &[u8]) {
    let Some((fds, rest)) = data.split_first() else { return };
    let Some((header, payload)) = rest.split_first_chunk::<HEADER_BYTES>() else { return };
    let Ok(header) = MessageHeader::parse(header) else { return };
    assert_eq!(MessageHeader::parse(&header.encode()), Ok(header));
    let null = File::open("/dev/null").expect("it exists");
    let fds = (0..fds % 12).map(|_| null.as_fd().try_clone_to_owned().expect("a descriptor")).collect();
    if let Err(error) = Request::decode(header.code, &payload[..payload.len().min(header.length)], fds) {
        assert!(error.to_string().starts_with(&header.code.to_string()), "{error}");
    }
}

/// Memory of a ring, mapped on both sides and reused, because a mapping for each input would take most of the
/// time.
struct Page {
    guest: towline_frontend::MemoryArena,
    memory: Arc<GuestMemory>,
}

impl Page {
    /// The page of this thread.
    fn of_thread() -> Rc<Self> {
        thread_local!(static PAGE: Rc<Page> = Rc::new(Page::new()));
        PAGE.with(Rc::clone)
    }

    fn new() -> Self {
        let guest = towline_frontend::MemoryArena::new(RING_BYTES as u64).expect("a memfd");
        let info = RegionInfo { guest_address: 0, size: RING_BYTES as u64, user_address: 0, mmap_offset: 0 };
        let region = Region::map(&info, guest.fd().try_clone_to_owned().expect("a descriptor"));
        let memory = Arc::new(GuestMemory::new(vec![region.expect("it exists")]).expect("one region"));
        Self { guest, memory }
    }
}

/// A ring of 8 entries in a page that the input fills. Every chain is echoed, and the input continues to
/// change the page.
pub fn ring(data: &[u8]) {
    let Some((mode, mut rest)) = data.split_first() else { return };
    let page = Page::of_thread();
    let put = |bytes: &[u8], offset: u64| page.guest.write(GUEST_BASE + offset, bytes);
    put(&[0; RING_BYTES], 0);
    let first = rest.len().min(RING_BYTES / 2);
    put(&rest[..first], 0);
    rest = &rest[first..];
    let features =
        [0, features::EVENT_IDX, features::INDIRECT_DESC, features::EVENT_IDX | features::INDIRECT_DESC];
    // The parts are adjacent, so 300 bytes are a ring; or they overlap.
    let used = if mode & 4 == 0 { 160 } else { 0 };
    let address =
        VringAddress { index: 0, flags: u32::from(mode & 8), descriptors: 0, used, available: 128, log: 0 };
    let features = features[usize::from(mode & 3)];
    let setup = RingSetup {
        size: 8,
        address,
        base: 0,
        features,
        call: None,
        switch: LogSwitch::default(),
        log: None,
    };
    let mut ring = Ring::new(setup, Arc::clone(&page.memory), 1).expect("its parts are in memory");
    let mut batch = Batch::new();
    let mut total = 0;
    while ring.fault().is_none() && total < CHAINS_MAX {
        let popped = ring.pop(&mut batch, 5);
        for chain in batch.chains() {
            let mut head = [0; 8];
            chain.read_at(0, &mut head);
            let written = chain.write_at(1, &head);
            ring.complete(chain, u32::try_from(written).expect("8 at most"));
        }
        ring.publish();
        let more = ring.enable_notification_and_recheck();
        total += popped;
        let Some((change, after)) = rest.split_first_chunk::<4>() else {
            if popped == 0 || !more { break } else { continue }
        };
        put(&change[2..], u64::from(u16::from_le_bytes([change[0], change[1]]) % 300));
        rest = after;
    }
}

/// A session: each message is its code, flags, number of descriptors, length and payload.
pub fn session(data: &[u8]) {
    let (near, far) = std::os::unix::net::UnixStream::pair().expect("a pair");
    let memory = file(1 << 16);
    // The input is the contents of guest memory too.
    memory.write_all_at(data.get(..1 << 16).unwrap_or(data), 0).expect("it fits");
    let mut rest = data;
    // As many as fit in the socket, which is read after all are written.
    for _ in 0..64 {
        let Some(([code, flags, fds, len], after)) = rest.split_first_chunk::<4>() else { break };
        let payload = &after[..after.len().min(usize::from(*len))];
        rest = &after[payload.len()..];
        let code = RequestCode(u32::from(*code));
        let mut bytes =
            MessageHeader { code, need_reply: flags & 1 != 0, length: payload.len() }.encode().to_vec();
        bytes.extend_from_slice(payload);
        let fds = vec![memory.as_fd(); usize::from(fds % 9)];
        send(&near, &bytes, &fds);
    }
    near.shutdown(std::net::Shutdown::Write).expect("it is open");
    let channel = towline_channel::UnixChannel::new(OwnedFd::from(far), "fuzz").expect("a socket");
    let device: Arc<dyn Device> = Arc::new(Echo);
    let cancel = Cancel::new().expect("an eventfd");
    // Any outcome is valid, but it has to end.
    let _ = serve(&channel, &device, &cancel);
}

fn send(socket: &std::os::unix::net::UnixStream, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
    let owned = socket.as_fd().try_clone_to_owned().expect("a descriptor");
    let channel = towline_channel::UnixChannel::new(owned, "fuzz").expect("a socket");
    let sent = towline_channel::Channel::send_fds(&channel, bytes, fds).expect("space in the socket");
    assert_eq!(sent, bytes.len());
}

/// A device of two queues that echoes its input.
pub struct Echo;

impl Device for Echo {
    fn name(&self) -> &str {
        "echo"
    }

    fn queue_count(&self) -> usize {
        2
    }

    fn queues_per_worker(&self) -> usize {
        2
    }

    fn features(&self) -> u64 {
        1
    }

    fn protocol_features(&self) -> towline_vhost_user::ProtocolFeatures {
        towline_vhost_user::ProtocolFeatures::BY_DEVICE
    }

    fn config(&self) -> Vec<u8> {
        vec![7; 20]
    }

    fn worker(&self, _: usize) -> Result<Box<dyn Worker>, BackendError> {
        Ok(Box::new(Echo))
    }
}

impl Worker for Echo {
    fn run(&mut self, queues: &mut Queues<'_>) -> Next {
        let mut batch = Batch::new();
        for queue in 0..queues.len() {
            if let Some(ring) = queues.ring(queue) {
                ring.pop(&mut batch, 8);
                for chain in batch.chains() {
                    let mut bytes = [0; 64];
                    let len = chain.read_at(0, &mut bytes);
                    let written = chain.write_at(0, &bytes[..len]);
                    ring.complete(chain, u32::try_from(written).expect("64 at most"));
                }
            }
        }
        Next::Wait
    }
}

/// Short random inputs.
#[cfg(test)]
mod random_inputs {
    use proptest::collection::vec;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

        #[test]
        fn random_messages_are_decoded_or_refused(data in vec(any::<u8>(), 0..300)) {
            super::message(&data);
        }

        #[test]
        fn random_rings_are_processed_within_bounds(data in vec(prop_oneof![Just(0u8), 0..4u8, any::<u8>()], 0..900)) {
            super::ring(&data);
        }

        #[test]
        fn random_sessions_end(data in vec(prop_oneof![Just(0u8), 1..44u8, any::<u8>()], 0..600)) {
            super::session(&data);
        }
    }
}
