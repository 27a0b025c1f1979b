use std::sync::Mutex;

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use super::*;
use crate::device::{Refusal, Worker};
use crate::message::{RegionInfo, VringFd, VringState};

/// Writes down what rings would be told.
#[derive(Default)]
struct Recorder {
    said: Vec<String>,
    /// Where a ring that is stopped stands.
    stands: Vec<Option<u16>>,
    fault: Option<RingFault>,
}

impl Rings for Recorder {
    fn start(
        &mut self,
        ring: usize,
        setup: RingSetup,
        _: &Arc<Memory>,
        _: (OwnedFd, Option<OwnedFd>),
    ) -> Result<Option<RingFault>, SessionError> {
        self.said.push(format!(
            "start {ring} size {} base {} log {}",
            setup.size,
            setup.base,
            setup.switch.is_on()
        ));
        Ok(self.fault.clone())
    }

    fn stop(&mut self, ring: usize) -> Result<Option<Stopped>, SessionError> {
        self.said.push(format!("stop {ring}"));
        let fd = || Some(std::fs::File::open("/dev/null").unwrap().into());
        Ok(self.stands.pop().flatten().map(|base| Stopped { base, kick: fd(), call: fd(), err: None }))
    }

    fn enable(&mut self, ring: usize, enabled: bool) -> Result<(), SessionError> {
        self.said.push(format!("enable {ring} {enabled}"));
        Ok(())
    }

    fn set_kick(&mut self, ring: usize, _: OwnedFd) -> Result<(), SessionError> {
        self.said.push(format!("kick {ring}"));
        Ok(())
    }

    fn set_call(&mut self, ring: usize, fd: Option<OwnedFd>) -> Result<(), SessionError> {
        self.said.push(format!("call {ring} {}", fd.is_some()));
        Ok(())
    }

    fn set_err(&mut self, ring: usize, _: Option<OwnedFd>) -> Result<(), SessionError> {
        self.said.push(format!("err {ring}"));
        Ok(())
    }

    fn set_address(&mut self, ring: usize, address: VringAddress) -> Result<(), SessionError> {
        self.said.push(format!("address {ring} flags {}", address.flags.get()));
        Ok(())
    }

    fn set_memory(&mut self, memory: &Arc<Memory>) -> Result<(), SessionError> {
        self.said.push(format!("memory {:#x}", memory.size()));
        Ok(())
    }

    fn set_log(&mut self, log: Option<&Arc<DirtyLog>>) -> Result<(), SessionError> {
        self.said.push(format!("log {}", log.is_some()));
        Ok(())
    }

    fn settle(&mut self) -> Result<(), SessionError> {
        self.said.push("settle".to_owned());
        Ok(())
    }
}

/// A device that remembers what it was told.
#[derive(Default)]
struct Card {
    told: Mutex<Vec<String>>,
}

impl Card {
    fn tell(&self, what: String) {
        self.told.lock().unwrap().push(what);
    }
}

impl Device for Card {
    fn name(&self) -> &str {
        "card"
    }

    fn queue_count(&self) -> usize {
        2
    }

    fn features(&self) -> u64 {
        1 << 5
    }

    fn protocol_features(&self) -> ProtocolFeatures {
        ProtocolFeatures::all()
    }

    fn acknowledge(&self, features: u64) -> Result<(), Refusal> {
        self.tell(format!("acknowledge {features:#x}"));
        Ok(())
    }

    fn worker(&self, _: usize) -> Result<Box<dyn Worker>, Refusal> {
        Err(Refusal::new("nobody asks"))
    }

    fn config(&self) -> Vec<u8> {
        vec![1, 2, 3]
    }

    fn set_mtu(&self, mtu: u16) -> Result<(), Refusal> {
        self.tell(format!("mtu {mtu}"));
        Ok(())
    }

    fn reset(&self) {
        self.tell("reset".to_owned());
    }

    fn save(&self) -> Result<Vec<u8>, Refusal> {
        Ok(vec![7; 300_000])
    }

    fn load(&self, state: &[u8]) -> Result<(), Refusal> {
        if state == [1, 2] { Ok(()) } else { Err(Refusal::new(format!("{} bytes", state.len()))) }
    }
}

fn session() -> (Session<Recorder>, Arc<Card>) {
    let card = Arc::new(Card::default());
    (Session::new(Arc::<Card>::clone(&card), Recorder::default()), card)
}

/// A session with everything agreed upon.
fn agreed() -> (Session<Recorder>, Arc<Card>) {
    let (mut session, card) = session();
    session.handle(Request::SetProtocolFeatures(session.offered_protocol().bits())).unwrap();
    session.handle(Request::SetFeatures(features::OURS & !features::LOG_ALL)).unwrap();
    (session, card)
}

fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC).unwrap()
}

fn shared(size: u64) -> OwnedFd {
    let fd = memfd_create("shared", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&fd, size).unwrap();
    fd
}

fn state(index: u32, number: u32) -> VringState {
    VringState { index: index.into(), number: number.into() }
}

fn address(flags: u32) -> VringAddress {
    let zero = 0.into();
    VringAddress {
        index: zero_32(),
        flags: flags.into(),
        descriptors: zero,
        used: zero,
        available: zero,
        log: zero,
    }
}

fn zero_32() -> zerocopy::byteorder::little_endian::U32 {
    0.into()
}

fn start(session: &mut Session<Recorder>) {
    session.handle(Request::SetVringNum(state(0, 256))).unwrap();
    session.handle(Request::SetVringBase(state(0, 5))).unwrap();
    session.handle(Request::SetVringAddress(address(0))).unwrap();
    session.handle(Request::SetVringCall(VringFd { index: 0, fd: Some(event()) })).unwrap();
    session.handle(Request::SetVringKick(VringFd { index: 0, fd: Some(event()) })).unwrap();
}

fn number(reply: Option<Reply>) -> u64 {
    match reply {
        Some(Reply::Number(number)) => number,
        other => panic!("{other:?}"),
    }
}

fn refusal(session: &mut Session<Recorder>, request: Request) -> String {
    session.handle(request).unwrap_err().to_string()
}

#[test]
fn an_owner_that_comes_again_begins_anew() {
    let (mut session, card) = agreed();
    session.handle(Request::SetOwner).unwrap();
    let (zero, size) = (0.into(), 4096.into());
    let info = RegionInfo { guest_address: zero, size, user_address: zero, mmap_offset: zero };
    session.handle(Request::SetMemTable(vec![(info, shared(4096))])).unwrap();
    assert_eq!(session.memory.size(), 4096);
    session.handle(Request::SetOwner).unwrap();
    assert_eq!((session.memory.size(), session.agreed.features), (0, None));
    assert!(card.told.lock().unwrap().contains(&"reset".to_owned()));
}

#[test]
fn only_what_was_offered_can_be_taken() {
    let (mut session, card) = session();
    let offered = number(session.handle(Request::GetFeatures).unwrap());
    assert_eq!(offered, features::OURS | 1 << 5);
    assert_eq!(
        refusal(&mut session, Request::SetFeatures(1 << 6)),
        "SET_FEATURES takes 0x40, which was not offered (offered: 0x174000020)"
    );
    assert!(refusal(&mut session, Request::SetProtocolFeatures(1 << 5)).contains("takes 0x20, which"));
    session.handle(Request::SetFeatures(offered)).unwrap();
    assert_eq!(*card.told.lock().unwrap(), ["acknowledge 0x130000020"]);
    assert!(!session.acknowledges());
    session.handle(Request::SetProtocolFeatures(ProtocolFeatures::REPLY_ACK.bits())).unwrap();
    assert!(session.acknowledges());
}

#[test]
fn what_was_not_negotiated_is_refused() {
    let (mut session, card) = session();
    assert_eq!(
        refusal(&mut session, Request::NetSetMtu(1500)),
        "NET_SET_MTU came, but ProtocolFeatures(NET_MTU) was not negotiated"
    );
    let (size, offset, fd) = (4096, 0, shared(4096));
    let log = refusal(&mut session, Request::SetLogBase(LogMemory { size, offset, fd }));
    assert_eq!(log, "SET_LOG_BASE came, but ProtocolFeatures(LOG_SHMFD) was not negotiated");
    assert!(card.told.lock().unwrap().is_empty());
    let (mut session, card) = agreed();
    session.handle(Request::NetSetMtu(1500)).unwrap();
    assert_eq!(
        refusal(&mut session, Request::NetSetMtu(70_000)),
        "NET_SET_MTU says 70000, expected at most 65535"
    );
    assert!(card.told.lock().unwrap().contains(&"mtu 1500".to_owned()));
}

#[test]
fn a_ring_starts_with_its_kick_and_stops_when_asked_where_it_is() {
    let (mut session, _) = agreed();
    start(&mut session);
    session.handle(Request::SetVringEnable(state(0, 1))).unwrap();
    assert_eq!(session.rings.said, ["start 0 size 256 base 5 log false", "enable 0 false", "enable 0 true"]);
    assert_eq!(
        refusal(&mut session, Request::SetVringNum(state(0, 8))),
        "SET_VRING_NUM for ring 0: it runs; stop it with GET_VRING_BASE first"
    );
    session.rings.stands = vec![Some(9)];
    let base = session.handle(Request::GetVringBase(state(0, 0))).unwrap();
    assert_eq!(base, Some(Reply::VringBase(state(0, 9))));
    // A second time it is where it was; and it goes on from there.
    let base = session.handle(Request::GetVringBase(state(0, 0))).unwrap();
    assert_eq!(base, Some(Reply::VringBase(state(0, 9))));
    session.handle(Request::SetVringKick(VringFd { index: 0, fd: Some(event()) })).unwrap();
    assert_eq!(session.rings.said.iter().rev().nth(1).unwrap(), "start 0 size 256 base 9 log false");
    // What was enabled stays so.
    assert_eq!(session.rings.said.last().unwrap(), "enable 0 true");
}

#[test]
fn without_protocol_features_a_ring_is_enabled_from_the_start() {
    let (mut session, _) = session();
    session.handle(Request::SetFeatures(features::VERSION_1)).unwrap();
    start(&mut session);
    assert_eq!(session.rings.said.last().unwrap(), "enable 0 true");
}

#[test]
fn a_ring_needs_all_its_parts() {
    let (mut session, _) = session();
    let kick = || Request::SetVringKick(VringFd { index: 1, fd: Some(event()) });
    assert_eq!(
        refusal(&mut session, kick()),
        "SET_VRING_KICK for ring 1: no features were taken with SET_FEATURES"
    );
    session.handle(Request::SetFeatures(0)).unwrap();
    assert_eq!(
        refusal(&mut session, kick()),
        "SET_VRING_KICK for ring 1: it has no address yet; SET_VRING_ADDR comes first"
    );
    let polled = refusal(&mut session, Request::SetVringKick(VringFd { index: 1, fd: None }));
    assert!(polled.ends_with("without an eventfd it would have to be polled"), "{polled}");
    assert_eq!(
        refusal(&mut session, Request::SetVringEnable(state(2, 1))),
        "SET_VRING_ENABLE names ring 2, but the device has 2"
    );
    for size in [0, 3, 65536] {
        let said = refusal(&mut session, Request::SetVringNum(state(0, size)));
        assert_eq!(
            said,
            format!("SET_VRING_NUM for ring 0 says {size}, expected a power of two up to 32768")
        );
    }
}

#[test]
fn a_ring_that_is_broken_does_not_end_the_session() {
    let (mut session, _) = agreed();
    session.rings.fault = Some(RingFault::Size { found: 0 });
    start(&mut session);
    session.handle(Request::SetVringNum(state(0, 8))).unwrap();
}

#[test]
fn the_log_goes_on_and_off_while_a_ring_runs() {
    let (mut session, card) = agreed();
    start(&mut session);
    session.rings.said.clear();
    let taken = session.agreed.features.unwrap();
    let log = LogMemory { size: 4096, offset: 0, fd: shared(4096) };
    assert_eq!(session.handle(Request::SetLogBase(log)).unwrap(), Some(Reply::Number(0)));
    session.handle(Request::SetFeatures(taken | features::LOG_ALL)).unwrap();
    assert!(session.switch.is_on());
    session.handle(Request::SetVringAddress(address(1))).unwrap();
    session.handle(Request::SetFeatures(taken)).unwrap();
    assert!(!session.switch.is_on());
    assert_eq!(session.rings.said, ["log true", "settle", "address 0 flags 1", "settle"]);
    // The guest's driver has no part in it.
    assert_eq!(card.told.lock().unwrap().len(), 1);
    assert_eq!(
        refusal(&mut session, Request::SetFeatures(taken | 1 << 5)),
        "SET_FEATURES changes the driver's features while ring 0 runs; stop it with GET_VRING_BASE first"
    );
}

#[test]
fn memory_comes_and_goes() {
    let (mut session, _) = agreed();
    let info = |guest: u64| RegionInfo {
        guest_address: guest.into(),
        size: 4096.into(),
        user_address: (guest + (1 << 40)).into(),
        mmap_offset: 0.into(),
    };
    session.handle(Request::SetMemTable(vec![(info(0), shared(4096))])).unwrap();
    session.handle(Request::AddMemReg(info(4096), shared(4096))).unwrap();
    session.handle(Request::RemMemReg(info(0))).unwrap();
    // Some frontends say it for each of their queue pairs.
    session.handle(Request::AddMemReg(info(4096), shared(4096))).unwrap();
    session.handle(Request::RemMemReg(info(0))).unwrap();
    let overlap = refusal(&mut session, Request::AddMemReg(info(4000), shared(4096)));
    assert_eq!(overlap, "the regions at guest addresses 0xfa0 and 0x1000 overlap");
    assert_eq!(session.rings.said, ["memory 0x1000", "memory 0x2000", "memory 0x1000"]);
}

#[test]
fn a_reset_stops_everything() {
    let (mut session, card) = agreed();
    start(&mut session);
    session.handle(Request::SetVringEnable(state(0, 1))).unwrap();
    session.handle(Request::SetStatus(15)).unwrap();
    assert_eq!(number(session.handle(Request::GetStatus).unwrap()), 15);
    session.handle(Request::ResetDevice).unwrap();
    assert_eq!(number(session.handle(Request::GetStatus).unwrap()), 0);
    assert_eq!(session.rings.said[3..], ["stop 0", "stop 1", "enable 0 false", "enable 1 false"]);
    assert_eq!(card.told.lock().unwrap().last().unwrap(), "reset");
}

#[test]
fn the_configuration_reads_as_zeros_behind_its_end() {
    let (mut session, _) = agreed();
    let reply = session.handle(Request::GetConfig { offset: 1, size: 4, flags: 0 }).unwrap();
    assert_eq!(reply, Some(Reply::Config { offset: 1, flags: 0, bytes: vec![2, 3, 0, 0] }));
    let refused = refusal(&mut session, Request::SetConfig { offset: 0, flags: 0, bytes: vec![1] });
    assert_eq!(refused, "SET_CONFIG: the device refuses: its configuration cannot be written");
}

#[test]
fn the_devices_state_goes_through_a_pipe() {
    use std::io::{Read as _, Write as _};
    let (mut session, _) = agreed();
    let transfer = |session: &mut Session<Recorder>, direction, fd| {
        number(session.handle(Request::SetDeviceStateFd(direction, fd)).unwrap())
    };
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    assert_eq!(transfer(&mut session, Direction::Save, writer), 0x100);
    let mut saved = Vec::new();
    std::fs::File::from(reader).read_to_end(&mut saved).unwrap();
    assert_eq!(saved, vec![7; 300_000]);
    assert_eq!(number(session.handle(Request::CheckDeviceState).unwrap()), 0);
    for (state, wanted) in [(&[1, 2][..], 0), (&[1, 3, 4], 1)] {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        assert_eq!(transfer(&mut session, Direction::Load, reader), 0x100);
        std::fs::File::from(writer).write_all(state).unwrap();
        assert_eq!(number(session.handle(Request::CheckDeviceState).unwrap()), wanted);
    }
    // Once is enough, and only while nothing runs.
    assert_eq!(number(session.handle(Request::CheckDeviceState).unwrap()), 1);
    start(&mut session);
    assert_eq!(transfer(&mut session, Direction::Save, event()), 0x101);
}

fn transfer(session: &mut Session<Recorder>, direction: Direction, fd: OwnedFd) -> u64 {
    number(session.handle(Request::SetDeviceStateFd(direction, fd)).unwrap())
}

/// Threads of this process that transfer device state for this test's sessions.
fn transfer_threads() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let name = |task: std::io::Result<std::fs::DirEntry>| {
        std::fs::read_to_string(task.ok()?.path().join("comm")).ok()
    };
    tasks.filter_map(name).filter(|name| name.trim() == "device-state").count()
}

#[test]
fn one_transfer_of_state_at_a_time() {
    let (mut session, _) = agreed();
    let mut writers = Vec::new();
    for round in 0..50 {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        let answer = transfer(&mut session, Direction::Load, reader);
        // The first waits for bytes; the others are refused while it does.
        assert_eq!(answer, if round == 0 { 0x100 } else { 0x101 }, "{round}");
        writers.push(writer);
    }
    assert!(transfer_threads() < 10, "{}", transfer_threads());
    // One that is over and was not asked for does not stand in the way.
    drop(writers);
    let until = std::time::Instant::now() + std::time::Duration::from_secs(60);
    loop {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        if transfer(&mut session, Direction::Load, reader) == 0x100 {
            drop(writer);
            break;
        }
        assert!(std::time::Instant::now() < until, "the end of a pipe is not seen");
    }
    assert_eq!(number(session.handle(Request::CheckDeviceState).unwrap()), 1, "no byte is no state");
}

#[test]
fn a_transfer_that_does_not_end_keeps_nobody() {
    let (mut session, _) = agreed();
    let cancel = Cancel::new().unwrap();
    session.set_cancel(&cancel);
    let (reader, _writer) = rustix::pipe::pipe().unwrap();
    assert_eq!(transfer(&mut session, Direction::Load, reader), 0x100);
    let cancels = std::thread::spawn(move || cancel.cancel());
    // The frontend keeps its end open, and the process is to end.
    assert_eq!(number(session.handle(Request::CheckDeviceState).unwrap()), 1);
    cancels.join().unwrap();
    // A frontend that hangs up leaves no thread behind, whatever it keeps open.
    let (mut session, _) = agreed();
    let (reader, _writer) = rustix::pipe::pipe().unwrap();
    assert_eq!(transfer(&mut session, Direction::Load, reader), 0x100);
    let begun = std::time::Instant::now();
    drop(session);
    assert!(begun.elapsed() < std::time::Duration::from_secs(30));
}

#[test]
fn in_postcopy_memory_is_told_and_watched_before_it_is_used() {
    use std::os::unix::fs::FileExt as _;
    let (mut session, _) = agreed();
    if !session.offered_protocol().contains(ProtocolFeatures::PAGEFAULT) {
        let name = "in_postcopy_memory_is_told_and_watched_before_it_is_used";
        return towline_lab::skip(name, "this process gets no userfaultfd");
    }
    let first = refusal(&mut session, Request::PostcopyListen);
    assert_eq!(first, "POSTCOPY_LISTEN: the device refuses: POSTCOPY_ADVISE comes first");
    assert_eq!(session.handle(Request::PostcopyAdvise).unwrap(), Some(Reply::Empty));
    let faults = session.take_answer_fd().unwrap();
    session.handle(Request::PostcopyListen).unwrap();
    let info = |guest: u64| RegionInfo {
        guest_address: guest.into(),
        size: 8192.into(),
        user_address: (guest + (1 << 40)).into(),
        mmap_offset: 0.into(),
    };
    let file = std::fs::File::from(shared(8192));
    let fd = || OwnedFd::from(file.try_clone().unwrap());
    let Some(Reply::Table(told)) = session.handle(Request::SetMemTable(vec![(info(0), fd())])).unwrap()
    else {
        panic!("a table was asked for");
    };
    let added = session.handle(Request::AddMemReg(info(8192), fd())).unwrap();
    assert!(matches!(added, Some(Reply::Region(region)) if region.guest_address.get() == 8192));
    assert_eq!(session.rings.said, [""; 0], "no ring has it yet");
    // What acknowledges is an empty table after one, eight zeros after a region.
    session.handle(Request::MemRegionsWatched).unwrap();
    assert_eq!(session.rings.said, ["memory 0x4000"]);
    let memory = Arc::clone(&session.memory);
    let reader = std::thread::spawn(move || {
        let mut pieces = Vec::new();
        assert!(memory.pieces(4096, 5, &mut pieces));
        let mut bytes = [0; 5];
        towline_channel::gather(&[memory.io_buf(&pieces[0])], &mut bytes);
        bytes
    });
    // The reader waits; its fault is where the frontend was told.
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let within = Timespec { tv_sec: 60, tv_nsec: 0 };
    assert_eq!(poll(&mut [PollFd::new(&faults, PollFlags::IN)], Some(&within)).unwrap(), 1);
    let mut event = [0; 32];
    assert_eq!(rustix::io::read(&faults, &mut event).unwrap(), 32);
    let address = u64::from_ne_bytes(*event[16..].first_chunk().unwrap());
    assert_eq!((event[0], address & !4095), (0x12, told[0].user_address.get() + 4096));
    // The page comes, and so does the end.
    file.write_all_at(b"later", 4096).unwrap();
    session.handle(Request::PostcopyEnd).unwrap();
    drop(faults);
    assert_eq!(reader.join().unwrap(), *b"later");
    assert!(refusal(&mut session, Request::MemRegionsWatched).contains("nothing was told"));
}

#[test]
fn packed_and_repeated_it_is_the_same() {
    let (mut session, _) = agreed();
    let zero = 0.into();
    let info = RegionInfo { guest_address: zero, size: 8192.into(), user_address: zero, mmap_offset: zero };
    session.handle(Request::SetMemTable(vec![(info, shared(8192))])).unwrap();
    let log = LogMemory { size: 4096, offset: 0, fd: shared(4096) };
    session.handle(Request::SetLogBase(log)).unwrap();
    start(&mut session);
    session.handle(Request::SetVringEnable(state(0, 1))).unwrap();
    // The last is asked first.
    session.rings.stands = vec![None, Some(9)];
    let packed = session.pack().unwrap();
    let (mut other, card) = self::session();
    for message in packed.agreed {
        other.handle(message.into_request().unwrap()).unwrap();
    }
    assert_eq!(other.rings.said, ["memory 0x2000", "log true", "enable 0 true", "enable 1 false"]);
    assert_eq!(*card.told.lock().unwrap(), ["acknowledge 0x130000000"]);
    for message in packed.starts {
        other.handle(message.into_request().unwrap()).unwrap();
    }
    assert_eq!(other.rings.said[4..], ["start 0 size 256 base 9 log false", "enable 0 true"]);
}
