//! The whole card and its session against a guest and a frontend that are hostile: an input is a list of steps, which may be
//! anything that either can do. Whatever they did, three properties hold:
//!
//! - one second after the last step the process uses no processor time;
//! - it has not more memory than `docs/net.md` says, by at most 10 %;
//! - each stop (`GET_VRING_BASE`) is answered within its deadline, and when the frontend hangs up every thread ends.
//!
//! The body is shared by the test in this directory and by the fuzz target `net_device`. One input at a time in a process, as it is
//! the process that is measured.

use std::net::UdpSocket;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use rustix::time::{ClockId, clock_gettime};
use towline_frontend::wire::{Code, RegionInfo, feature, halves, protocol, request, words};
use towline_frontend::{Error, Frontend, GUEST_BASE, Memory, USER_BASE};
use towline_lab::Network;
use towline_net::{Net, Options, Taps};
use towline_vhost_user::{Cancel, Device};

/// Steps of one input.
const STEPS_MAX: usize = 200;
const NEIGHBOUR: &str = "ip neigh replace 10.9.0.2 lladdr 02:00:00:09:00:02 nud permanent dev tap0";
const MEMORY_BYTES: u64 = 1 << 18;
const QUEUES: u32 = 2;
/// Where each ring's parts are: 64 KiB for each.
const RING_STRIDE: u64 = 1 << 16;
const AVAILABLE: u64 = 0x4000;
const USED: u64 = 0x8000;
/// What a stop may take: it drains for a second, and the machine may be busy.
const STOP_WITHIN: Duration = Duration::from_secs(10);
const END_WITHIN: Duration = Duration::from_secs(20);
/// What docs/net.md says of a card with one pair and a device state.
const MEMORY_KIB_MAX: u64 = (4 + 64) << 10;

/// What the process has for all inputs.
struct Rig {
    network: Network,
    net: Arc<Net>,
    host: UdpSocket,
    /// Whether the tap was set down.
    down: AtomicBool,
    /// Anonymous memory and threads before the first input.
    memory_kib: u64,
    threads: usize,
}

/// Why nothing can be tested here, if so.
static RIG: OnceLock<Result<Mutex<Rig>, String>> = OnceLock::new();

impl Rig {
    fn new() -> Result<Self, String> {
        let network = Network::new().map_err(|error| format!("no network of its own: {error:#}"))?;
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

    /// Sets the interface up or down, as whoever runs the host may. Its neighbours are gone when it was down.
    fn set_tap(&self, up: bool) {
        if self.down.swap(!up, Ordering::Relaxed) != up {
            return;
        }
        let way = if up { "ip link set tap0 up" } else { "ip link set tap0 down" };
        for line in [way, NEIGHBOUR].into_iter().take(1 + usize::from(up)) {
            self.network.run(&line.split(' ').collect::<Vec<_>>()).expect("the network is ours");
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

/// Bytes that say what to do; zeros when they are used up.
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

/// One guest with its frontend.
struct Guest<'r> {
    rig: &'r Rig,
    frontend: Frontend,
    features: u64,
    memory: Memory,
    log: Memory,
    available: [u16; QUEUES as usize],
    kicks: Vec<OwnedFd>,
    /// Ends of pipes that are kept open.
    pipes: Vec<OwnedFd>,
    running: [bool; QUEUES as usize],
    /// Entries of each ring as it was started last.
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
        let memory = Memory::in_regions(MEMORY_BYTES, 1)?;
        frontend.set_mem_table(Some(&memory))?;
        let log = Memory::new(1 << 16)?;
        let kicks = (0..QUEUES).map(|_| event(EventfdFlags::empty())).collect();
        let (available, pipes, running, sizes) = ([0; 2], Vec::new(), [false; 2], [1; 2]);
        Ok(Self { rig, frontend, features, memory, log, available, kicks, pipes, running, sizes })
    }

    /// Does one step. An error is a connection that is over, or a refusal, of which the frontend makes nothing.
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
        self.frontend.request(Code::SET_VRING_NUM, &halves(ring, size), &[])?;
        self.frontend.request(Code::SET_VRING_BASE, &halves(ring, base), &[])?;
        let user = USER_BASE + Self::base(ring) - GUEST_BASE;
        let used = if input.byte() < 240 { USED } else { AVAILABLE };
        let places = words(&[user, user + used, user + AVAILABLE, Self::base(ring) + used]);
        let payload = [halves(ring, input.below(2)), places].concat();
        self.frontend.request(Code::SET_VRING_ADDR, &payload, &[])?;
        let kick = self.kicks[ring as usize].as_fd().try_clone_to_owned().expect("a descriptor");
        let call = event(EventfdFlags::empty());
        self.frontend.request(Code::SET_VRING_CALL, &words(&[ring.into()]), &[call.as_fd()])?;
        self.frontend.request(Code::SET_VRING_KICK, &words(&[ring.into()]), &[kick.as_fd()])?;
        self.running[ring as usize] = true;
        (self.sizes[ring as usize], self.available[ring as usize]) = (size, base as u16);
        self.frontend.enable(ring, input.byte() < 230)
    }

    /// The answer comes within its deadline, whatever there was before.
    fn stop(&mut self, ring: u32) -> Done {
        let begun = Instant::now();
        let stopped = self.frontend.stop(ring);
        assert!(begun.elapsed() < STOP_WITHIN, "a stop took {:?}", begun.elapsed());
        self.running[ring as usize] = false;
        stopped.map(drop)
    }

    /// Writes a descriptor, most often one that can be.
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

    /// Makes some heads available, and kicks, mostly.
    fn offer(&mut self, ring: u32, input: &mut Input<'_>) {
        let (place, index) = (Self::base(ring) + AVAILABLE, &mut self.available[ring as usize]);
        let size = u64::from(input.pick(&[256u16, 8, 64, 2, 1, 512]));
        for _ in 0..input.byte() % 40 {
            let entry = place + 4 + 2 * (u64::from(*index) % size);
            self.memory.store_16(entry, input.word() % 260, Ordering::Relaxed);
            *index = index.wrapping_add(1);
        }
        if input.byte() > 250 {
            *index = index.wrapping_add(input.word());
        }
        self.memory.store_16(place + 2, *index, Ordering::Release);
        if input.byte() < 240 {
            let _ = rustix::io::write(&self.kicks[ring as usize], &1u64.to_ne_bytes());
        }
    }

    /// What a driver does that is not hostile: buffers for frames, or frames, of all lengths, as many as the ring has room for.
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
            self.memory.store_16(place + 4 + 2 * u64::from(head), head, Ordering::Relaxed);
            *index = index.wrapping_add(1);
            self.memory.store_16(place + 2, *index, Ordering::Release);
        }
        let _ = rustix::io::write(&self.kicks[ring as usize], &1u64.to_ne_bytes());
    }

    fn host_sends(&mut self, input: &mut Input<'_>) {
        let bytes = vec![7; usize::from(input.word())];
        for _ in 0..=input.pick(&[0, 1, 3, 15, 400]) {
            let length = input.pick(&[64, bytes.len(), 1400, 30_000]).min(bytes.len());
            // A tap that is full takes nothing.
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
            guest: 0x8000_0000 + (at << 16),
            size: 1 << 16,
            user: (1 << 30) + (at << 16),
            offset: 0,
        };
        let payload = [words(&[0]), region.encode()].concat();
        match input.below(8) {
            0..=2 => self.frontend.request(Code::ADD_MEM_REG, &payload, &[self.log.fd()]),
            3 | 4 => self.frontend.request(Code::REM_MEM_REG, &payload, &[]),
            5 | 6 => self.frontend.set_mem_table(Some(&self.memory)),
            _ => self.frontend.set_mem_table(None),
        }
    }

    /// Kicks, calls and errors by something that is no eventfd, or one with a will of its own.
    fn strange_descriptor(&mut self, ring: u32, input: &mut Input<'_>) -> Done {
        let file = |path: &str| {
            std::fs::File::options().read(true).write(true).open(path).expect("it is there").into()
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
        let code = input.pick(&[Code::SET_VRING_KICK, Code::SET_VRING_CALL, Code::SET_VRING_ERR]);
        self.frontend.request(code, &words(&[ring.into()]), &[fd.as_fd()])
    }

    fn device_state(&mut self, input: &mut Input<'_>) -> Done {
        if input.below(4) == 0 {
            // Only a transfer that is over has an end to wait for.
            self.pipes.clear();
            return self.frontend.number(Code::CHECK_DEVICE_STATE).map(drop);
        }
        let (reader, writer) = rustix::pipe::pipe().expect("a pipe");
        let direction = input.below(2);
        let (theirs, ours) = if direction == 0 { (writer, reader) } else { (reader, writer) };
        if direction == 1 {
            let _ = rustix::io::write(&ours, input.0.get(..20).unwrap_or_default());
        }
        let asked = self.frontend.query(Code::SET_DEVICE_STATE_FD, &halves(direction, 0), &[theirs.as_fd()]);
        self.pipes.push(ours);
        asked.map(drop)
    }

    fn any_request(&mut self, input: &mut Input<'_>) -> Done {
        let code = Code("any", input.below(48));
        let length = usize::from(input.byte() % 64);
        let payload: Vec<u8> = (0..length).map(|_| input.byte()).collect();
        let fds = vec![self.log.fd(); usize::from(input.byte() % 4)];
        self.frontend.send(&request(code, true, &payload), code, &fds)?;
        // Whether and how it is answered depends on what it is; the next exchange is one of numbers.
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
            0..100 => self.frontend.request(Code::SET_STATUS, &words(&[input.byte().into()]), &[]),
            100..140 => self.frontend.request(Code::RESET_DEVICE, &[], &[]),
            140..160 => self.frontend.request(Code::SET_OWNER, &[], &[]),
            160..170 => self.frontend.request(Code::SEND_RARP, &words(&[7]), &[]),
            170..180 => self.truncate(),
            180..200 => {
                self.rig.set_tap(input.below(3) == 0);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Truncates guest memory, kicks, and gives the pages back, as zeros, before anything here touches them.
    fn truncate(&mut self) -> Done {
        rustix::fs::ftruncate(self.memory.fd(), 0).expect("it is ours");
        for kick in &self.kicks {
            let _ = rustix::io::write(kick, &1u64.to_ne_bytes());
        }
        // What the answer is depends on whether the device has touched it by now.
        let answered = self.frontend.number(Code::GET_FEATURES);
        rustix::fs::ftruncate(self.memory.fd(), MEMORY_BYTES).expect("it is ours");
        answered.map(drop)
    }
}

/// The connection is over, or nobody can tell what comes next on it.
fn is_over(error: &Error) -> bool {
    !matches!(error, Error::Reply { found, .. } if found.starts_with('['))
}

/// A second after the last step no thread of the process runs. It is looked at sooner, too, so that most inputs need no second.
fn assert_rests(what: &[u8]) {
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
    assert!(used < window / 10, "{used:?} of {window:?} after {} bytes of input", what.len());
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
            // However it ends, it ends.
            let _ = towline_vhost_user::serve(&channel, &device, &token);
        };
        (Self { cancel, thread: Some(std::thread::spawn(serve)) }, ours)
    }

    fn end(mut self) {
        self.cancel.cancel();
        let until = Instant::now() + END_WITHIN;
        let thread = self.thread.take().expect("it is ended once");
        while !thread.is_finished() {
            assert!(Instant::now() < until, "the session does not end");
            std::thread::sleep(Duration::from_millis(1));
        }
        thread.join().expect("the session's thread panicked");
    }
}

/// Plays one input. Why it cannot be done on this machine, if so.
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
        assert_rests(data);
        let memory = memory_kib().saturating_sub(rig.memory_kib);
        assert!(
            memory <= MEMORY_KIB_MAX / 10 * 11,
            "{memory} KiB more than before, at most {MEMORY_KIB_MAX} are stated"
        );
        for ring in 0..QUEUES {
            // Answers of before may still be in the socket; then the next one is not the stop's.
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
    // What the fuzzer, or the allocator, keeps of its own is not the card's.
    rig.memory_kib = rig.memory_kib.max(memory_kib());
    Ok(())
}
