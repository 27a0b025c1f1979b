//! A disk of a guest, written at random, and its copy at a standby that is cut off at random.

use std::os::unix::net::UnixStream;
use std::thread;

use fastrand::Rng;
use tempfile::TempDir;
use towline_channel::pair;

use super::*;

const DISK_BYTES: usize = 1 << 14;
const LIMIT: usize = 2 * OPEN_BYTES;
const WITHIN: Duration = Duration::from_secs(10);
/// NBD's requests.
const WRITE: u16 = 1;
const TRIM: u16 = 4;

/// A guest's disk, its log, and the standby's disk.
struct Protected {
    here: Vec<u8>,
    log: Arc<DiskLog>,
    disks: Vec<StandbyDisk>,
    /// The disk of the QEMU that waits.
    there: Arc<Mutex<Vec<u8>>>,
    _directory: TempDir,
}

fn queue() -> Arc<CheckpointQueue> {
    Arc::new(CheckpointQueue::new(Vec::new()))
}

/// Does a request that is of this disk.
fn change(disk: &mut [u8], request: &[u8]) {
    let kind = u16::from_be_bytes(*request[6..].first_chunk().unwrap());
    let offset = u64::from_be_bytes(*request[16..].first_chunk().unwrap()) as usize;
    let bytes = u32::from_be_bytes(*request[24..].first_chunk().unwrap()) as usize;
    match kind {
        WRITE => disk[offset..offset + bytes].copy_from_slice(&request[28..]),
        _ => disk[offset..offset + bytes].fill(0),
    }
}

impl Protected {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        let disk = Export { name: "disk0".into(), bytes: DISK_BYTES as u64 };
        let there = Arc::new(Mutex::new(vec![0; DISK_BYTES]));
        let (waiting, exports) = (Arc::clone(&there), [disk.clone()]);
        let server = UnixListener::bind(path("waiting")).unwrap();
        thread::spawn(move || {
            let stream = server.accept().unwrap().0;
            let (_, mut server) = NbdServer::negotiate(stream, &exports).unwrap().unwrap();
            let _ = server.serve(&mut |done| {
                if let Change::Write { request, .. } = done {
                    change(&mut lock(&waiting), request);
                }
                Ok(())
            });
        });
        let (one, other) = pair(LIMIT);
        let listener = UnixListener::bind(path("ferry")).unwrap();
        let logs =
            DiskLog::serve(std::slice::from_ref(&disk), vec![Arc::new(one)], listener, &queue(), LIMIT)
                .unwrap();
        let standby = StandbyDisk::new(&disk, &path("waiting"), Arc::new(other), LIMIT).unwrap();
        await_done(&*logs[0].channel).unwrap();
        let here = vec![0; DISK_BYTES];
        Self { here, log: Arc::clone(&logs[0]), disks: vec![standby], there, _directory: directory }
    }

    /// The guest writes somewhere.
    fn write(&mut self, random: &mut Rng) {
        let bytes = random.usize(1..2000);
        let (offset, byte) = (random.usize(0..=DISK_BYTES - bytes), random.u8(1..));
        let kind = if random.u8(..) < 40 { TRIM } else { WRITE };
        let mut request = 0x2560_9513u32.to_be_bytes().to_vec();
        request.extend([0, 0]);
        request.extend(kind.to_be_bytes());
        request.extend(random.u64(..).to_be_bytes());
        request.extend((offset as u64).to_be_bytes());
        request.extend((bytes as u32).to_be_bytes());
        request.resize(request.len() + if kind == WRITE { bytes } else { 0 }, byte);
        self.log.write(&request, bytes as u64).unwrap();
        change(&mut self.here, &request);
    }

    /// The guest is stopped.
    fn cut(&self) -> Vec<u8> {
        self.log.stopping();
        self.log.cut().unwrap();
        self.here.clone()
    }

    /// The standby has the whole checkpoint of this epoch.
    fn receive(&self, epoch: u64) -> io::Result<()> {
        EpochWrites::receive(&self.disks, epoch, WITHIN)?.write()
    }
}

#[test]
fn the_copy_is_always_that_of_the_last_whole_checkpoint() {
    for seed in 0..40 {
        let random = &mut Rng::with_seed(seed);
        let mut guest = Protected::new();
        for _ in 0..random.usize(..20) {
            guest.write(random);
        }
        guest.log.flush().unwrap();
        assert!(*lock(&guest.there) == guest.here, "seed {seed}: flushed before the first checkpoint");
        // Taken, and not yet passed on; the standby's.
        let (mut taken, mut copy) = (VecDeque::new(), None);
        let mut epoch = 0;
        for _ in 0..random.usize(20..60) {
            match random.u8(..10) {
                0..6 => guest.write(random),
                6..8 if taken.len() < 2 => taken.push_back(guest.cut()),
                _ => {
                    if let Some(disk) = taken.pop_front() {
                        epoch += 1;
                        guest.log.pass_on(epoch).unwrap();
                        if random.u8(..) < 20 {
                            // The rest of the checkpoint does not come.
                            break;
                        }
                        guest.receive(epoch).unwrap();
                        copy = Some(disk);
                    }
                }
            }
            if let Some(copy) = &copy {
                assert!(*lock(&guest.there) == *copy, "seed {seed}: the copy is not that of epoch {epoch}");
            }
        }
    }
}

#[test]
fn a_write_waits_for_room_for_a_while_unless_the_guest_is_being_stopped() {
    let guest = Protected::new();
    guest.cut();
    let is_done = |log: &Arc<DiskLog>| {
        let log = Arc::clone(log);
        thread::spawn(move || log.write(&[0; 28], 1))
    };
    lock(&guest.log.state).open.resize(OPEN_BYTES, 0);
    let begun = Instant::now();
    is_done(&guest.log).join().unwrap().unwrap();
    assert!(begun.elapsed() >= WRITE_WAITS);
    guest.log.stopping();
    is_done(&guest.log).join().unwrap().unwrap();
    lock(&guest.log.state).open.resize(LIMIT, 0);
    assert!(is_done(&guest.log).join().unwrap().unwrap_err().to_string().contains("in one epoch"));
    lock(&guest.log.state).is_stopping = false;
    let waits = is_done(&guest.log);
    guest.log.close("the standby is lost".into());
    assert!(waits.join().unwrap().is_err());
    assert!(guest.log.cut().unwrap_err().contains("disk0: the standby is lost"));
}

#[test]
fn what_is_not_the_epoch_that_is_awaited_is_refused() {
    let guest = Protected::new();
    guest.cut();
    guest.log.pass_on(2).unwrap();
    assert!(
        guest.receive(1).unwrap_err().to_string().contains("disk disk0: the writes of epoch 2, expected 1")
    );
    // A length that no epoch has, and something else than writes.
    for (head, writes) in [(u64::MAX, &[][..]), (3, b"abc")] {
        let guest = Protected::new();
        let message = [&1u64.to_be_bytes()[..], &head.to_be_bytes(), writes].concat();
        guest.log.channel.send_all(&[IoBuf::from(&message[..])], SendFlags::empty()).unwrap();
        assert_eq!(guest.receive(1).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }
}

#[test]
fn a_mirror_that_ends_ends_the_log() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("ferry");
    let listener = UnixListener::bind(&socket).unwrap();
    let disk = Export { name: "disk0".into(), bytes: 1 << 20 };
    let (one, _other) = pair(LIMIT);
    let logs = DiskLog::serve(&[disk], vec![Arc::new(one)], listener, &queue(), LIMIT).unwrap();
    // Another client ends nothing.
    drop(UnixStream::connect(&socket).unwrap());
    let client = NbdClient::connect(&socket, "disk0", None, WITHIN).unwrap();
    logs[0].cut().unwrap();
    drop(client);
    let deadline = Instant::now() + WITHIN;
    while logs[0].cut().is_ok() {
        assert!(Instant::now() < deadline);
        thread::yield_now();
    }
}
