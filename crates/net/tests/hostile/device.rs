//! The whole card and its session against a hostile guest and frontend. An input is a list of steps, which
//! cover everything that either can do. After any steps three properties hold:
//!
//! - one second after the last step the process uses no processor time;
//! - its memory exceeds the limit in `docs/net.md` by at most 10 %;
//! - each stop (`GET_VRING_BASE`) has a reply within its deadline, and all threads end when the frontend
//!   disconnects.
//!
//! Shared by the test in this directory and the fuzz target `net_device`. One input at a time, as the process
//! is measured.

use std::net::UdpSocket;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use rustix::time::{ClockId, clock_gettime};
use towline_frontend::wire::{
    RegionInfo, RequestCode, acknowledged_request, encode_u32_pair, encode_u64s, feature, protocol,
};
use towline_frontend::{Error, Frontend, GUEST_BASE, MemoryArena, USER_BASE};
use towline_lab::Network;
use towline_net::{Net, Options, Taps};
use towline_vhost_user::{Cancel, Device};

/// Maximum number of steps of an input.
const STEPS_MAX: usize = 200;
const NEIGHBOUR: &str = "ip neigh replace 10.9.0.2 lladdr 02:00:00:09:00:02 nud permanent dev tap0";
const MEMORY_BYTES: u64 = 1 << 18;
const QUEUES: u32 = 2;
/// Distance of the rings, and offsets of their parts.
const RING_STRIDE: u64 = 1 << 16;
const AVAILABLE: u64 = 0x4000;
const USED: u64 = 0x8000;
/// Time limit of a stop: it drains for a second, and the machine may be busy.
const STOP_WITHIN: Duration = Duration::from_secs(10);
const END_WITHIN: Duration = Duration::from_secs(20);
/// Limit in docs/net.md for a card with one pair and a device state.
const MEMORY_KIB_MAX: u64 = (4 + 64) << 10;

/// Card and host, shared by all inputs.
struct Rig {
    network: Network,
    net: Arc<Net>,
    host: UdpSocket,
    /// True if the tap is down.
    down: AtomicBool,
    /// Anonymous memory and threads before the first input.
    memory_kib: u64,
    threads: usize,
}

/// The rig, or the reason why there is none.
static RIG: OnceLock<Result<Mutex<Rig>, String>> = OnceLock::new();

impl Rig {
    fn new() -> Result<Self, String> {
        let network = Network::new().map_err(|error| format!("no separate network: {error:#}"))?;
        let entered = network.enter(|| Taps::open("tap0", 1)).map_err(|error| format!("{error:#}"))?;
        let taps = entered.map_err(|error| error.to_string())?;
        for line in ["ip link set tap0 mtu 65521", "ip address add 10.9.0.1/24 dev tap0", NEIGHBOUR] {
            network.run(&line.split(' ').collect::<Vec<_>>()).map_err(|error| format!("{error:#}"))?;
        }
        let socket =
            network.enter(|| UdpSocket::bind(("10.9.0.1", 9))).map_err(|error| format!("{error:#}"))?;
        let host = socket.map_err(|error| error.to_string())?;
        host.set_nonblocking(true).map_err(|error| error.to_string())?;
        let net = Arc::new(Net::new(taps, Options { device_state: true, ..Options::default() }));
        Ok(Self {
            network,
            net,
            host,
            down: AtomicBool::new(false),
            memory_kib: memory_kib(),
            threads: threads(),
        })
    }

    /// Sets the interface up or down, as an administrator may. The neighbour entry is lost when it is down.
    fn set_tap(&self, up: bool) {
        if self.down.swap(!up, Ordering::Relaxed) != up {
            return;
        }
        let way = if up { "ip link set tap0 up" } else { "ip link set tap0 down" };
        for line in [way, NEIGHBOUR].into_iter().take(1 + usize::from(up)) {
            self.network
                .run(&line.split(' ').collect::<Vec<_>>())
                .expect("the network namespace is writable");
        }
    }
}

/// Anonymous memory of this process.
fn memory_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("procfs");
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).expect("Linux 4.5 or later");
    line.trim_end_matches("kB").trim().parse().expect("a number")
}

fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").expect("procfs").count()
}

/// Processor time of this process.
fn processor() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).expect("below a second"))
}

/// The bytes of an input, followed by zeros.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    fn below(&mut self, count: u32) -> u32 {
        u32::from(self.byte()) % count
    }

    fn word(&mut self) -> u16 {
        u16::from_le_bytes([self.byte(), self.byte()])
    }

    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[usize::from(self.byte()) % of.len()]
    }
}

/// A guest with its frontend.
struct Guest<'r> {
    rig: &'r Rig,
    frontend: Frontend,
    features: u64,
    memory: MemoryArena,
    log: MemoryArena,
    available: [u16; QUEUES as usize],
    kicks: Vec<OwnedFd>,
    /// Open ends of pipes.
    pipes: Vec<OwnedFd>,
    running: [bool; QUEUES as usize],
    /// Number of entries of each ring when it was last started.
    sizes: [u32; QUEUES as usize],
}

fn event(flags: EventfdFlags) -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK | flags).expect("a descriptor")
}

type Done = Result<(), Error>;

impl<'r> Guest<'r> {
    fn new(rig: &'r Rig, stream: UnixStream, input: &mut Input<'_>) -> Result<Self, Error> {
        let mut frontend = Frontend::new(stream)?;
        let wished = [feature::EVENT_IDX | feature::INDIRECT, feature::EVENT_IDX, feature::INDIRECT, 0];
        let merged = [1 << 15, 0];
        let wished = input.pick(&wished) | input.pick(&merged);
        let needed = protocol::REPLY_ACK | protocol::LOG_SHMFD | protocol::MEM_SLOTS | 1 << 19;
        let features = frontend.negotiate(0, wished, needed)?.features;
        let memory = MemoryArena::with_regions(MEMORY_BYTES, 1)?;
        frontend.set_mem_table(Some(&memory))?;
        let log = MemoryArena::new(1 << 16)?;
        let kicks = (0..QUEUES).map(|_| event(EventfdFlags::empty())).collect();
        let (available, pipes, running, sizes) = ([0; 2], Vec::new(), [false; 2], [1; 2]);
        Ok(Self { rig, frontend, features, memory, log, available, kicks, pipes, running, sizes })
    }

    /// Does one step. An error is a refusal, which the frontend ignores, or the end of the connection.
    fn step(&mut self, input: &mut Input<'_>) -> Done {
        let ring = input.below(QUEUES);
        match input.byte() % 23 {
            0 | 1 => self.start(ring, input),
            2 => self.stop(ring),
            3 => self.frontend.enable(ring, input.below(2) == 1),
            4..=6 => {
                self.describe(ring, input);
                Ok(())
            }
            7..=9 => {
                self.offer(ring, input);
                Ok(())
            }
            10 | 11 => {
                self.host_sends(input);
                Ok(())
            }
            12 => {
                self.rig.net.set_link(input.below(2) == 1);
                Ok(())
            }
            13 => self.log_or_features(input),
            14 => self.change_memory(input),
            15 => self.strange_descriptor(ring, input),
            16 => self.device_state(input),
            17 => self.any_request(input),
            18 => {
                self.scribble(ring, input);
                Ok(())
            }
            19 | 20 => {
                self.behave(ring, input);
                Ok(())
            }
            _ => self.rarely(input),
        }
    }

    fn base(ring: u32) -> u64 {
        GUEST_BASE + u64::from(ring) * RING_STRIDE
    }

    fn start(&mut self, ring: u32, input: &mut Input<'_>) -> Done {
        let size = input.pick(&[256u32, 8, 64, 2, 1, 512, 3, 32768]);
        let base = input.pick(&[0u32, 0, 0, 1, 65535, 7]);
        self.frontend.request(RequestCode::SET_VRING_NUM, &encode_u32_pair(ring, size), &[])?;
        self.frontend.request(RequestCode::SET_VRING_BASE, &encode_u32_pair(ring, base), &[])?;
        let user = USER_BASE + Self::base(ring) - GUEST_BASE;
        let used = if input.byte() < 240 { USED } else { AVAILABLE };
        let places = encode_u64s(&[user, user + used, user + AVAILABLE, Self::base(ring) + used]);
        let payload = [encode_u32_pair(ring, input.below(2)), places].concat();
        self.frontend.request(RequestCode::SET_VRING_ADDR, &payload, &[])?;
        let kick = self.kicks[ring as usize].as_fd().try_clone_to_owned().expect("a descriptor");
        let call = event(EventfdFlags::empty());
        self.frontend.request(RequestCode::SET_VRING_CALL, &encode_u64s(&[ring.into()]), &[call.as_fd()])?;
        self.frontend.request(RequestCode::SET_VRING_KICK, &encode_u64s(&[ring.into()]), &[kick.as_fd()])?;
        self.running[ring as usize] = true;
        (self.sizes[ring as usize], self.available[ring as usize]) = (size, base as u16);
        self.frontend.enable(ring, input.byte() < 230)
    }

    /// Stops a ring, and asserts that the reply is in time.
    fn stop(&mut self, ring: u32) -> Done {
        let started = Instant::now();
        let stopped = self.frontend.stop(ring);
        assert!(started.elapsed() < STOP_WITHIN, "a stop took {:?}", started.elapsed());
        self.running[ring as usize] = false;
        stopped.map(drop)
    }

    /// Writes a descriptor, usually a valid one.
    fn describe(&mut self, ring: u32, input: &mut Input<'_>) {
        let at = Self::base(ring) + 16 * u64::from(input.word() % 512);
        let guest = match input.byte() {
            0..200 => GUEST_BASE + 2 * RING_STRIDE + u64::from(input.word()) * 2,
            200..220 => GUEST_BASE + MEMORY_BYTES - u64::from(input.byte()),
            220..240 => Self::base(ring) + u64::from(input.word()) % USED,
            _ => u64::from(input.word()) << 48,
        };
        let len = match input.byte() {
            0..200 => u32::from(input.word()),
            200..230 => u32::from(input.byte()),
            230..250 => 16 * u32::from(input.byte()),
            _ => u32::MAX,
        };
        let flags = input.pick(&[2u16, 0, 2, 0, 3, 1, 4, 5, 6, 7, 0xffff]);
        self.memory.write(at, &guest.to_le_bytes());
        self.memory.write(at + 8, &len.to_le_bytes());
        self.memory.write(at + 12, &flags.to_le_bytes());
        self.memory.write(at + 14, &(input.word() % 520).to_le_bytes());
    }

    /// Makes some heads available, and usually kicks.
    fn offer(&mut self, ring: u32, input: &mut Input<'_>) {
        let (place, index) = (Self::base(ring) + AVAILABLE, &mut self.available[ring as usize]);
        let size = u64::from(input.pick(&[256u16, 8, 64, 2, 1, 512]));
        for _ in 0..input.byte() % 40 {
            let entry = place + 4 + 2 * (u64::from(*index) % size);
            self.memory.store_le16(entry, input.word() % 260, Ordering::Relaxed);
            *index = index.wrapping_add(1);
        }
        if input.byte() > 250 {
            *index = index.wrapping_add(input.word());
        }
        self.memory.store_le16(place + 2, *index, Ordering::Release);
        if input.byte() < 240 {
            let _ = rustix::io::write(&self.kicks[ring as usize], &1u64.to_ne_bytes());
        }
    }

    /// Fills the ring with valid buffers, or frames, as a well-behaved driver does.
    fn behave(&mut self, ring: u32, input: &mut Input<'_>) {
        let (size, place) = (self.sizes[ring as usize].clamp(1, 256) as u16, Self::base(ring) + AVAILABLE);
        let lens = [[1526u32, 12, 100, 4096, 65_600], [12 + 60, 12, 5, 12 + 1514, 65_600]];
        let len = input.pick(&lens[ring as usize]);
        let flags = if ring == 0 { 2u16 } else { 0 };
        for _ in 0..=input.word() % size {
            let index = &mut self.available[ring as usize];
            let head = *index % size;
            let at = Self::base(ring) + 16 * u64::from(head);
            let guest = GUEST_BASE + 2 * RING_STRIDE;
            self.memory.write(at, &guest.to_le_bytes());
            self.memory.write(at + 8, &len.to_le_bytes());
            self.memory.write(at + 12, &flags.to_le_bytes());
            self.memory.store_le16(place + 4 + 2 * u64::from(head), head, Ordering::Relaxed);
            *index = index.wrapping_add(1);
            self.memory.store_le16(place + 2, *index, Ordering::Release);
        }
        let _ = rustix::io::write(&self.kicks[ring as usize], &1u64.to_ne_bytes());
    }

    fn host_sends(&mut self, input: &mut Input<'_>) {
        let bytes = vec![7; usize::from(input.word())];
        for _ in 0..=input.pick(&[0, 1, 3, 15, 400]) {
            let length = input.pick(&[64, bytes.len(), 1400, 30_000]).min(bytes.len());
            // Fails if the tap is full.
            let _ = self.rig.host.send_to(&bytes[..length], ("10.9.0.2", 9));
        }
    }

    fn log_or_features(&mut self, input: &mut Input<'_>) -> Done {
        match input.below(4) {
            0 => self.frontend.set_log(&self.log),
            1 => self.frontend.set_features(self.features | feature::LOG_ALL),
            2 => self.frontend.set_features(self.features),
            _ => self.frontend.set_features(1 << input.below(40)),
        }
    }

    fn change_memory(&mut self, input: &mut Input<'_>) -> Done {
        let at = u64::from(input.below(4));
        let region = RegionInfo {
            guest_address: 0x8000_0000 + (at << 16),
            size: 1 << 16,
            user_address: (1 << 30) + (at << 16),
            mmap_offset: 0,
        };
        let payload = [encode_u64s(&[0]), region.encode()].concat();
        match input.below(8) {
            0..=2 => self.frontend.request(RequestCode::ADD_MEM_REG, &payload, &[self.log.fd()]),
            3 | 4 => self.frontend.request(RequestCode::REM_MEM_REG, &payload, &[]),
            5 | 6 => self.frontend.set_mem_table(Some(&self.memory)),
            _ => self.frontend.set_mem_table(None),
        }
    }

    /// Sets a kick, call or error descriptor that is not an eventfd, or one in semaphore mode.
    fn strange_descriptor(&mut self, ring: u32, input: &mut Input<'_>) -> Done {
        let file = |path: &str| {
            std::fs::File::options().read(true).write(true).open(path).expect("the file exists").into()
        };
        let fd: OwnedFd = match input.below(7) {
            0 => file("/dev/null"),
            1 => file("/dev/zero"),
            2 => file("/dev/urandom"),
            3 => eventfd(u32::MAX, EventfdFlags::SEMAPHORE | EventfdFlags::CLOEXEC).expect("a descriptor"),
            4 => self.memory.fd().try_clone_to_owned().expect("a descriptor"),
            5 => std::io::pipe().expect("a pipe").0.into(),
            _ => UnixStream::pair().expect("a pair").0.into(),
        };
        let code = input.pick(&[
            RequestCode::SET_VRING_KICK,
            RequestCode::SET_VRING_CALL,
            RequestCode::SET_VRING_ERR,
        ]);
        self.frontend.request(code, &encode_u64s(&[ring.into()]), &[fd.as_fd()])
    }

    fn device_state(&mut self, input: &mut Input<'_>) -> Done {
        if input.below(4) == 0 {
            // CHECK_DEVICE_STATE waits for the end of the transfer.
            self.pipes.clear();
            return self.frontend.number(RequestCode::CHECK_DEVICE_STATE).map(drop);
        }
        let (reader, writer) = rustix::pipe::pipe().expect("a pipe");
        let direction = input.below(2);
        let (theirs, ours) = if direction == 0 { (writer, reader) } else { (reader, writer) };
        if direction == 1 {
            let _ = rustix::io::write(&ours, input.0.get(..20).unwrap_or_default());
        }
        let reply = self.frontend.query(
            RequestCode::SET_DEVICE_STATE_FD,
            &encode_u32_pair(direction, 0),
            &[theirs.as_fd()],
        );
        self.pipes.push(ours);
        reply.map(drop)
    }

    fn any_request(&mut self, input: &mut Input<'_>) -> Done {
        let code = RequestCode("any", input.below(48));
        let length = usize::from(input.byte() % 64);
        let payload: Vec<u8> = (0..length).map(|_| input.byte()).collect();
        let fds = vec![self.log.fd(); usize::from(input.byte() % 4)];
        self.frontend.send(&acknowledged_request(code, &payload), code, &fds)?;
        // Discards the reply, if there is one.
        self.frontend.stream().set_read_timeout(Some(Duration::from_millis(20))).expect("a time");
        let _ = std::io::Read::read(&mut self.frontend.stream(), &mut [0; 4096]);
        self.frontend.stream().set_read_timeout(Some(STOP_WITHIN)).expect("a time");
        Ok(())
    }

    fn scribble(&mut self, ring: u32, input: &mut Input<'_>) {
        let place = Self::base(ring) + input.pick(&[0, AVAILABLE, USED]);
        for _ in 0..8 {
            let at = place + u64::from(input.word()) % 1024;
            self.memory.write(at, &[input.byte()]);
        }
    }

    fn rarely(&mut self, input: &mut Input<'_>) -> Done {
        match input.byte() {
            0..100 => {
                self.frontend.request(RequestCode::SET_STATUS, &encode_u64s(&[input.byte().into()]), &[])
            }
            100..140 => self.frontend.request(RequestCode::RESET_DEVICE, &[], &[]),
            140..160 => self.frontend.request(RequestCode::SET_OWNER, &[], &[]),
            160..170 => self.frontend.request(RequestCode::SEND_RARP, &encode_u64s(&[7]), &[]),
            170..180 => self.truncate(),
            180..200 => {
                self.rig.set_tap(input.below(3) == 0);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Truncates guest memory, kicks, and extends it again, with zeros, before this process accesses it.
    fn truncate(&mut self) -> Done {
        rustix::fs::ftruncate(self.memory.fd(), 0).expect("the memory is a memfd");
        for kick in &self.kicks {
            let _ = rustix::io::write(kick, &1u64.to_ne_bytes());
        }
        // The reply depends on whether the device has accessed the memory.
        let reply = self.frontend.number(RequestCode::GET_FEATURES);
        rustix::fs::ftruncate(self.memory.fd(), MEMORY_BYTES).expect("the memory is a memfd");
        reply.map(drop)
    }
}

/// Returns true if the connection has ended, or is out of step.
fn is_over(error: &Error) -> bool {
    !matches!(error, Error::Reply { found, .. } if found.starts_with('['))
}

/// Asserts that the process is idle a second after the last step. Most inputs are idle sooner and need no
/// second.
fn assert_idle(input: &[u8]) {
    let until = Instant::now() + Duration::from_secs(1);
    loop {
        let (before, window) = (processor(), Duration::from_millis(15));
        std::thread::sleep(window);
        if processor() - before < window / 10 {
            return;
        }
        if Instant::now() > until {
            break;
        }
    }
    let (before, window) = (processor(), Duration::from_millis(500));
    std::thread::sleep(window);
    let used = processor() - before;
    assert!(used < window / 10, "{used:?} of {window:?} after {} bytes of input", input.len());
}

struct Served {
    cancel: Cancel,
    thread: Option<JoinHandle<()>>,
}

impl Served {
    fn start(net: &Arc<Net>) -> (Self, UnixStream) {
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        let cancel = Cancel::new().expect("a descriptor");
        let (device, token): (Arc<dyn Device>, _) = (Arc::clone(net) as _, cancel.clone());
        let serve = move || {
            let channel = towline_channel::UnixChannel::new(theirs.into(), "the driver").expect("a socket");
            // Any result is permitted.
            let _ = towline_vhost_user::serve(&channel, &device, &token);
        };
        (Self { cancel, thread: Some(std::thread::Builder::new().spawn(serve).unwrap()) }, ours)
    }

    fn end(mut self) {
        self.cancel.cancel();
        let until = Instant::now() + END_WITHIN;
        let thread = self.thread.take().expect("`end` is called once");
        while !thread.is_finished() {
            assert!(Instant::now() < until, "the session does not end");
            std::thread::sleep(Duration::from_millis(1));
        }
        thread.join().expect("the session's thread panicked");
    }
}

/// Plays one input. The error is the reason why this machine cannot.
#[allow(unreachable_pub, reason = "the fuzz target includes this file")]
pub fn play(data: &[u8]) -> Result<(), String> {
    let rig = RIG.get_or_init(|| Rig::new().map(Mutex::new)).as_ref().map_err(String::clone)?;
    let mut rig = rig.lock().unwrap_or_else(PoisonError::into_inner);
    let mut input = Input(data);
    let (served, stream) = Served::start(&rig.net);
    if let Ok(mut guest) = Guest::new(&rig, stream, &mut input) {
        let mut alive = true;
        for _ in 0..STEPS_MAX {
            if input.0.is_empty() || !alive {
                break;
            }
            alive = !guest.step(&mut input).is_err_and(|error| is_over(&error));
        }
        assert_idle(data);
        let memory = memory_kib().saturating_sub(rig.memory_kib);
        assert!(
            memory <= MEMORY_KIB_MAX / 10 * 11,
            "{memory} KiB more than before, the limit is {MEMORY_KIB_MAX}"
        );
        for ring in 0..QUEUES {
            // A stop fails if replies of earlier requests are still in the socket.
            if alive && guest.running[ring as usize] {
                alive = guest.stop(ring).is_ok();
            }
        }
    }
    served.end();
    rig.net.set_link(true);
    rig.set_tap(true);
    let until = Instant::now() + END_WITHIN;
    while threads() > rig.threads {
        assert!(Instant::now() < until, "{} threads, {} before", threads(), rig.threads);
        std::thread::sleep(Duration::from_millis(1));
    }
    // Memory that the fuzzer or the allocator keeps is not counted for the next input.
    rig.memory_kib = rig.memory_kib.max(memory_kib());
    Ok(())
}
