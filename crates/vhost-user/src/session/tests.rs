use std::sync::Mutex;

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use super::*;
use crate::device::{BackendError, Worker};
use crate::message::VringAddress;
use crate::message::{TransferDirection, VringFd, VringState};
use crate::ring::{RingFault, RingSetup};

/// Records the calls of the session.
#[derive(Default)]
struct Recorder {
    calls: Vec<String>,
    /// Available indices of stopped rings; the last one is used first.
    bases: Vec<Option<u16>>,
    fault: Option<RingFault>,
}

impl Rings for Recorder {
    fn start(
        &mut self,
        ring: usize,
        setup: RingSetup,
        _: &Arc<GuestMemory>,
        _: RingFds,
    ) -> Result<Option<RingFault>, SessionError> {
        self.calls.push(format!(
            "start {ring} size {} base {} log {}",
            setup.size,
            setup.base,
            setup.switch.is_on()
        ));
        Ok(self.fault.clone())
    }

    fn stop(&mut self, ring: usize) -> Result<Option<u16>, SessionError> {
        self.calls.push(format!("stop {ring}"));
        Ok(self.bases.pop().flatten())
    }

    fn enable(&mut self, ring: usize, enablement: Enablement) -> Result<(), SessionError> {
        self.calls.push(format!("enable {ring} {enablement:?}"));
        Ok(())
    }

    fn set_kick(&mut self, ring: usize, _: OwnedFd) -> Result<(), SessionError> {
        self.calls.push(format!("kick {ring}"));
        Ok(())
    }

    fn set_call(&mut self, ring: usize, fd: Option<OwnedFd>) -> Result<(), SessionError> {
        self.calls.push(format!("call {ring} {}", fd.is_some()));
        Ok(())
    }

    fn set_err(&mut self, ring: usize, _: Option<OwnedFd>) -> Result<(), SessionError> {
        self.calls.push(format!("err {ring}"));
        Ok(())
    }

    fn set_address(&mut self, ring: usize, address: VringAddress) -> Result<(), SessionError> {
        self.calls.push(format!("address {ring} flags {}", address.flags));
        Ok(())
    }

    fn set_memory(&mut self, memory: &Arc<GuestMemory>) -> Result<(), SessionError> {
        self.calls.push(format!("memory {:#x}", memory.size()));
        Ok(())
    }

    fn set_log(&mut self, log: Option<&Arc<DirtyLog>>) -> Result<(), SessionError> {
        self.calls.push(format!("log {}", log.is_some()));
        Ok(())
    }

    fn quiesce(&mut self) -> Result<(), SessionError> {
        self.calls.push("quiesce".to_owned());
        Ok(())
    }
}

/// A device that records its calls.
#[derive(Default)]
struct Card {
    calls: Mutex<Vec<String>>,
}

impl Card {
    fn record(&self, what: String) {
        self.calls.lock().unwrap().push(what);
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

    fn acknowledge(&self, features: u64) -> Result<(), BackendError> {
        self.record(format!("acknowledge {features:#x}"));
        Ok(())
    }

    fn worker(&self, _: usize) -> Result<Box<dyn Worker>, BackendError> {
        Err(BackendError::new("this device has no workers"))
    }

    fn config(&self) -> Vec<u8> {
        vec![1, 2, 3]
    }

    fn set_mtu(&self, mtu: u16) -> Result<(), BackendError> {
        self.record(format!("mtu {mtu}"));
        Ok(())
    }

    fn reset(&self) {
        self.record("reset".to_owned());
    }

    fn save(&self) -> Result<Vec<u8>, BackendError> {
        Ok(vec![7; 300_000])
    }

    fn load(&self, state: &[u8]) -> Result<(), BackendError> {
        if state == [1, 2] { Ok(()) } else { Err(BackendError::new(format!("{} bytes", state.len()))) }
    }
}

fn session() -> (Session<Recorder>, Arc<Card>) {
    let card = Arc::new(Card::default());
    (Session::new(Arc::<Card>::clone(&card), Arc::default(), Recorder::default()), card)
}

/// A session with negotiated features.
fn negotiated() -> (Session<Recorder>, Arc<Card>) {
    let (mut session, card) = session();
    session.handle(Request::SetProtocolFeatures(session.offered_protocol().bits())).unwrap();
    session.handle(Request::SetFeatures(features::COMMON & !features::LOG_ALL)).unwrap();
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
    VringState { index, number }
}

fn address(flags: u32) -> VringAddress {
    VringAddress { index: 0, flags, descriptors: 0, used: 0, available: 0, log: 0 }
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
fn a_second_owner_starts_over() {
    let (mut session, card) = negotiated();
    session.handle(Request::SetOwner).unwrap();
    let info = RegionInfo { guest_address: 0, size: 4096, user_address: 0, mmap_offset: 0 };
    session.handle(Request::SetMemTable(vec![(info, shared(4096))])).unwrap();
    assert_eq!(session.memory.size(), 4096);
    session.handle(Request::SetOwner).unwrap();
    assert_eq!((session.memory.size(), session.features), (0, None));
    assert!(card.calls.lock().unwrap().contains(&"reset".to_owned()));
}

#[test]
fn only_offered_features_are_accepted() {
    let (mut session, card) = session();
    let offered = number(session.handle(Request::GetFeatures).unwrap());
    assert_eq!(offered, features::COMMON | 1 << 5);
    assert_eq!(
        refusal(&mut session, Request::SetFeatures(1 << 6)),
        "SET_FEATURES accepts 0x40, which was not offered (offered: 0x174000020)"
    );
    assert!(refusal(&mut session, Request::SetProtocolFeatures(1 << 5)).contains("accepts 0x20, which"));
    session.handle(Request::SetFeatures(offered)).unwrap();
    assert_eq!(*card.calls.lock().unwrap(), ["acknowledge 0x130000020"]);
    assert!(!session.has_reply_ack());
    session.handle(Request::SetProtocolFeatures(ProtocolFeatures::REPLY_ACK.bits())).unwrap();
    assert!(session.has_reply_ack());
}

#[test]
fn requests_of_features_that_were_not_negotiated_are_refused() {
    let (mut session, card) = session();
    assert_eq!(
        refusal(&mut session, Request::NetSetMtu(1500)),
        "NET_SET_MTU requires ProtocolFeatures(NET_MTU), which was not negotiated"
    );
    let (size, offset, fd) = (4096, 0, shared(4096));
    let log = refusal(&mut session, Request::SetLogBase(LogMemory { size, offset, fd }));
    assert_eq!(log, "SET_LOG_BASE requires ProtocolFeatures(LOG_SHMFD), which was not negotiated");
    assert!(card.calls.lock().unwrap().is_empty());
    let (mut session, card) = negotiated();
    session.handle(Request::NetSetMtu(1500)).unwrap();
    assert_eq!(
        refusal(&mut session, Request::NetSetMtu(70_000)),
        "NET_SET_MTU has 70000, expected at most 65535"
    );
    assert!(card.calls.lock().unwrap().contains(&"mtu 1500".to_owned()));
}

#[test]
fn a_ring_starts_with_its_kick_and_stops_when_its_base_is_requested() {
    let (mut session, _) = negotiated();
    start(&mut session);
    session.handle(Request::SetVringEnable(state(0, 1))).unwrap();
    assert_eq!(
        session.rings.calls,
        ["start 0 size 256 base 5 log false", "enable 0 Initial", "enable 0 Enabled"]
    );
    assert_eq!(
        refusal(&mut session, Request::SetVringNum(state(0, 8))),
        "SET_VRING_NUM for ring 0: it runs; stop it with GET_VRING_BASE first"
    );
    session.rings.bases = vec![Some(9)];
    let base = session.handle(Request::GetVringBase(state(0, 0))).unwrap();
    assert_eq!(base, Some(Reply::VringBase(state(0, 9))));
    // The base of a stopped ring is preserved, and the ring resumes from there.
    let base = session.handle(Request::GetVringBase(state(0, 0))).unwrap();
    assert_eq!(base, Some(Reply::VringBase(state(0, 9))));
    session.handle(Request::SetVringKick(VringFd { index: 0, fd: Some(event()) })).unwrap();
    assert_eq!(session.rings.calls.iter().rev().nth(1).unwrap(), "start 0 size 256 base 9 log false");
    // An enabled ring stays enabled.
    assert_eq!(session.rings.calls.last().unwrap(), "enable 0 Enabled");
}

#[test]
fn without_protocol_features_a_ring_is_enabled_from_the_start() {
    let (mut session, _) = session();
    session.handle(Request::SetFeatures(features::VERSION_1)).unwrap();
    start(&mut session);
    assert_eq!(session.rings.calls.last().unwrap(), "enable 0 Enabled");
}

#[test]
fn a_ring_needs_all_its_parts() {
    let (mut session, _) = session();
    let kick = || Request::SetVringKick(VringFd { index: 1, fd: Some(event()) });
    assert_eq!(
        refusal(&mut session, kick()),
        "SET_VRING_KICK for ring 1: no features yet; SET_FEATURES comes first"
    );
    session.handle(Request::SetFeatures(0)).unwrap();
    assert_eq!(
        refusal(&mut session, kick()),
        "SET_VRING_KICK for ring 1: it has no address yet; SET_VRING_ADDR comes first"
    );
    let polled = refusal(&mut session, Request::SetVringKick(VringFd { index: 1, fd: None }));
    assert!(polled.ends_with("polled rings are not supported; send an eventfd"), "{polled}");
    assert_eq!(
        refusal(&mut session, Request::SetVringEnable(state(2, 1))),
        "SET_VRING_ENABLE is for ring 2, but the device has 2"
    );
    for size in [0, 3, 65536] {
        let refused = refusal(&mut session, Request::SetVringNum(state(0, size)));
        assert_eq!(
            refused,
            format!("SET_VRING_NUM for ring 0 has {size}, expected a power of two up to 32768")
        );
    }
}

#[test]
fn a_ring_with_a_fault_does_not_end_the_session() {
    let (mut session, _) = negotiated();
    session.rings.fault = Some(RingFault::Size { found: 0 });
    start(&mut session);
    session.handle(Request::SetVringNum(state(0, 8))).unwrap();
}

#[test]
fn the_log_is_switched_while_a_ring_runs() {
    let (mut session, card) = negotiated();
    start(&mut session);
    session.rings.calls.clear();
    let accepted = session.features.unwrap();
    let log = LogMemory { size: 4096, offset: 0, fd: shared(4096) };
    assert_eq!(session.handle(Request::SetLogBase(log)).unwrap(), Some(Reply::Number(0)));
    session.handle(Request::SetFeatures(accepted | features::LOG_ALL)).unwrap();
    assert!(session.switch.is_on());
    session.handle(Request::SetVringAddress(address(1))).unwrap();
    session.handle(Request::SetFeatures(accepted)).unwrap();
    assert!(!session.switch.is_on());
    assert_eq!(session.rings.calls, ["log true", "quiesce", "address 0 flags 1", "quiesce"]);
    // The guest's driver does not negotiate it.
    assert_eq!(card.calls.lock().unwrap().len(), 1);
    assert_eq!(
        refusal(&mut session, Request::SetFeatures(accepted | 1 << 5)),
        "SET_FEATURES changes the driver's features while ring 0 runs; stop it with GET_VRING_BASE first"
    );
}

#[test]
fn memory_regions_are_added_and_removed() {
    let (mut session, _) = negotiated();
    let info = |guest: u64| RegionInfo {
        guest_address: guest,
        size: 4096,
        user_address: guest + (1 << 40),
        mmap_offset: 0,
    };
    session.handle(Request::SetMemTable(vec![(info(0), shared(4096))])).unwrap();
    session.handle(Request::AddMemReg(info(4096), shared(4096))).unwrap();
    session.handle(Request::RemMemReg(info(0))).unwrap();
    // Some frontends repeat the request for each of their queue pairs.
    session.handle(Request::AddMemReg(info(4096), shared(4096))).unwrap();
    session.handle(Request::RemMemReg(info(0))).unwrap();
    let overlap = refusal(&mut session, Request::AddMemReg(info(4000), shared(4096)));
    assert_eq!(overlap, "the regions at guest addresses 0xfa0 and 0x1000 overlap");
    assert_eq!(session.rings.calls, ["memory 0x1000", "memory 0x2000", "memory 0x1000"]);
}

#[test]
fn a_reset_stops_all_rings() {
    let (mut session, card) = negotiated();
    start(&mut session);
    session.handle(Request::SetVringEnable(state(0, 1))).unwrap();
    session.handle(Request::SetStatus(15)).unwrap();
    assert_eq!(number(session.handle(Request::GetStatus).unwrap()), 15);
    session.handle(Request::ResetDevice).unwrap();
    assert_eq!(number(session.handle(Request::GetStatus).unwrap()), 0);
    assert_eq!(session.rings.calls[3..], ["stop 0", "stop 1", "enable 0 Initial", "enable 1 Initial"]);
    assert_eq!(card.calls.lock().unwrap().last().unwrap(), "reset");
}

/// A QEMU that starts beside the one that has the device resets its own machine.
#[test]
fn a_reset_before_the_features_leaves_the_device_as_it_is() {
    let (mut session, card) = session();
    session.handle(Request::SetProtocolFeatures(ProtocolFeatures::RESET_DEVICE.bits())).unwrap();
    assert!(!session.concerns_device(&Request::ResetDevice));
    session.handle(Request::ResetDevice).unwrap();
    assert!(!card.calls.lock().unwrap().contains(&"reset".to_owned()));
    let offered = number(session.handle(Request::GetFeatures).unwrap());
    session.handle(Request::SetFeatures(offered)).unwrap();
    assert!(session.concerns_device(&Request::ResetDevice));
}

#[test]
fn the_configuration_space_reads_as_zeros_behind_its_end() {
    let (mut session, _) = negotiated();
    let reply = session.handle(Request::GetConfig { offset: 1, size: 4, flags: 0 }).unwrap();
    assert_eq!(reply, Some(Reply::Config { offset: 1, flags: 0, bytes: vec![2, 3, 0, 0] }));
    let refused = refusal(&mut session, Request::SetConfig { offset: 0, flags: 0, bytes: vec![1] });
    assert_eq!(refused, "SET_CONFIG: the device refuses: its configuration cannot be written");
}

#[test]
fn device_state_is_transferred_through_a_pipe() {
    use std::io::{Read as _, Write as _};
    let (mut session, _) = negotiated();
    let transfer = |session: &mut Session<Recorder>, direction, fd| {
        number(session.handle(Request::SetDeviceStateFd(direction, fd)).unwrap())
    };
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    assert_eq!(transfer(&mut session, TransferDirection::Save, writer), 0x100);
    let mut saved = Vec::new();
    std::fs::File::from(reader).read_to_end(&mut saved).unwrap();
    assert_eq!(saved, vec![7; 300_000]);
    assert_eq!(number(session.handle(Request::CheckDeviceState).unwrap()), 0);
    for (state, wanted) in [(&[1, 2][..], 0), (&[1, 3, 4], 1)] {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        assert_eq!(transfer(&mut session, TransferDirection::Load, reader), 0x100);
        std::fs::File::from(writer).write_all(state).unwrap();
        assert_eq!(number(session.handle(Request::CheckDeviceState).unwrap()), wanted);
    }
    // The result is reported once, and a transfer requires that no ring runs.
    assert_eq!(number(session.handle(Request::CheckDeviceState).unwrap()), 1);
    start(&mut session);
    assert_eq!(transfer(&mut session, TransferDirection::Save, event()), 0x101);
}

fn transfer(session: &mut Session<Recorder>, direction: TransferDirection, fd: OwnedFd) -> u64 {
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
fn a_second_transfer_of_device_state_is_refused() {
    let (mut session, _) = negotiated();
    let mut writers = Vec::new();
    for round in 0..50 {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        let reply = transfer(&mut session, TransferDirection::Load, reader);
        // The first waits for bytes; the others are refused in the meantime.
        assert_eq!(reply, if round == 0 { 0x100 } else { 0x101 }, "{round}");
        writers.push(writer);
    }
    assert!(transfer_threads() < 10, "{}", transfer_threads());
    // A finished transfer without CHECK_DEVICE_STATE does not prevent the next one.
    drop(writers);
    let until = std::time::Instant::now() + std::time::Duration::from_secs(60);
    loop {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        if transfer(&mut session, TransferDirection::Load, reader) == 0x100 {
            drop(writer);
            break;
        }
        assert!(std::time::Instant::now() < until, "the end of the pipe is not detected");
    }
    assert_eq!(number(session.handle(Request::CheckDeviceState).unwrap()), 1, "an empty state is invalid");
}

#[test]
fn a_transfer_that_does_not_end_is_cancelled() {
    let (mut session, _) = negotiated();
    let cancel = Cancel::new().unwrap();
    session.set_cancel(&cancel);
    let (reader, _writer) = rustix::pipe::pipe().unwrap();
    assert_eq!(transfer(&mut session, TransferDirection::Load, reader), 0x100);
    let cancels = std::thread::spawn(move || cancel.cancel());
    // The frontend keeps its end open, and the process is to end.
    assert_eq!(number(session.handle(Request::CheckDeviceState).unwrap()), 1);
    cancels.join().unwrap();
    // A frontend that disconnects leaks no thread, even if it keeps descriptors open.
    let (mut session, _) = negotiated();
    let (reader, _writer) = rustix::pipe::pipe().unwrap();
    assert_eq!(transfer(&mut session, TransferDirection::Load, reader), 0x100);
    let begun = std::time::Instant::now();
    drop(session);
    assert!(begun.elapsed() < std::time::Duration::from_secs(30));
}

#[test]
fn postcopy_memory_is_registered_before_it_is_used() {
    use std::os::unix::fs::FileExt as _;
    let (mut session, _) = negotiated();
    if !session.offered_protocol().contains(ProtocolFeatures::PAGEFAULT) {
        let name = "postcopy_memory_is_registered_before_it_is_used";
        return towline_lab::skip(name, "this process cannot create a userfaultfd");
    }
    let first = refusal(&mut session, Request::PostcopyListen);
    assert_eq!(first, "POSTCOPY_LISTEN: the device refuses: POSTCOPY_ADVISE comes first");
    assert_eq!(session.handle(Request::PostcopyAdvise).unwrap(), Some(Reply::Empty));
    let faults = session.take_reply_fd().unwrap();
    session.handle(Request::PostcopyListen).unwrap();
    let info = |guest: u64| RegionInfo {
        guest_address: guest,
        size: 8192,
        user_address: guest + (1 << 40),
        mmap_offset: 0,
    };
    let file = std::fs::File::from(shared(8192));
    let fd = || OwnedFd::from(file.try_clone().unwrap());
    let Some(Reply::Table(mapped)) = session.handle(Request::SetMemTable(vec![(info(0), fd())])).unwrap()
    else {
        panic!("not a table");
    };
    let added = session.handle(Request::AddMemReg(info(8192), fd())).unwrap();
    assert!(matches!(added, Some(Reply::Region(region)) if region.guest_address == 8192));
    assert_eq!(session.rings.calls, [""; 0], "no ring uses it yet");
    // Acknowledged by an empty table after a table, by eight zeros after a region.
    session.handle(Request::PostcopyRegionsAck).unwrap();
    assert_eq!(session.rings.calls, ["memory 0x4000"]);
    let memory = Arc::clone(&session.memory);
    let reader = std::thread::spawn(move || {
        let mut segments = Vec::new();
        assert!(memory.append_segments(4096, 5, &mut segments));
        let mut bytes = [0; 5];
        towline_channel::gather(&[memory.io_buf(&segments[0])], &mut bytes);
        bytes
    });
    // The reader waits; its fault has the address in the reply.
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let within = Timespec { tv_sec: 60, tv_nsec: 0 };
    assert_eq!(poll(&mut [PollFd::new(&faults, PollFlags::IN)], Some(&within)).unwrap(), 1);
    let mut event = [0; 32];
    assert_eq!(rustix::io::read(&faults, &mut event).unwrap(), 32);
    let address = u64::from_ne_bytes(*event[16..].first_chunk().unwrap());
    assert_eq!((event[0], address & !4095), (0x12, mapped[0].user_address + 4096));
    // The page arrives, then the end of postcopy.
    file.write_all_at(b"later", 4096).unwrap();
    session.handle(Request::PostcopyEnd).unwrap();
    drop(faults);
    assert_eq!(reader.join().unwrap(), *b"later");
    assert!(refusal(&mut session, Request::PostcopyRegionsAck).contains("no region was mapped"));
}

/// A file of /proc has what is_local knows of a file on FUSE.
#[test]
fn a_file_that_another_process_serves_ends_the_connection() {
    let (mut session, _) = negotiated();
    let served = || OwnedFd::from(std::fs::File::open("/proc/self/status").unwrap());
    let info = RegionInfo { guest_address: 0, size: 4096, user_address: 0, mmap_offset: 0 };
    let eventfd = || VringFd { index: 0, fd: Some(served()) };
    let requests = [
        Request::SetMemTable(vec![(info, shared(4096)), (info, served())]),
        Request::AddMemReg(info, served()),
        Request::SetLogBase(LogMemory { size: 4096, offset: 0, fd: served() }),
        Request::SetLogFd(Some(served())),
        Request::SetVringKick(eventfd()),
        Request::SetVringCall(eventfd()),
        Request::SetVringErr(eventfd()),
        Request::SetDeviceStateFd(TransferDirection::Load, served()),
    ];
    for request in requests {
        let error = session.handle(request).unwrap_err();
        assert!(
            error.is_fatal() && error.to_string().starts_with("a descriptor refers to a file that another"),
            "{error}"
        );
    }
    assert_eq!(session.rings.calls, [""; 0]);
}

#[test]
fn a_log_is_awaited_after_the_last_ring_stopped_and_after_logging_was_off() {
    let (mut session, _) = negotiated();
    let log = || Request::SetLogBase(LogMemory { size: 4096, offset: 0, fd: shared(4096) });
    let logging = features::COMMON;
    assert!(!session.switch.is_on());
    // A migration begins before the rings start, and while they run.
    session.handle(Request::SetFeatures(logging)).unwrap();
    assert!(session.switch.is_on() && session.switch.is_awaited());
    start(&mut session);
    assert!(session.switch.is_awaited());
    session.handle(log()).unwrap();
    assert!(session.switch.is_on() && !session.switch.is_awaited());
    session.handle(log()).unwrap();
    assert!(!session.switch.is_awaited(), "a log of another size");
    session.handle(Request::SetFeatures(logging & !features::LOG_ALL)).unwrap();
    assert!(!session.switch.is_on());
    session.handle(log()).unwrap();
    session.handle(Request::SetFeatures(logging)).unwrap();
    assert!(session.switch.is_on() && !session.switch.is_awaited());
    // A ring that does not run has no log to be released.
    session.handle(Request::GetVringBase(state(1, 0))).unwrap();
    assert!(!session.switch.is_awaited());
    session.handle(Request::GetVringBase(state(0, 0))).unwrap();
    assert!(session.switch.is_awaited());
    session.handle(log()).unwrap();
    session.handle(Request::SetOwner).unwrap();
    session.handle(Request::SetOwner).unwrap();
    assert!(!session.switch.is_on());
    session.handle(Request::SetFeatures(logging)).unwrap();
    assert!(session.switch.is_awaited());
}
