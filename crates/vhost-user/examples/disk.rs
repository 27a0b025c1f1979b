//! A read-only virtio disk whose contents depend on its length only: every word is a hash of its number. QEMU
//! migrates a guest with such a disk, because any process can serve it, and reconnects to it after a restart
//! (`reconnect`).
//!
//! ```text
//! cargo run -p towline-vhost-user --example disk -- /tmp/disk.sock 8
//! qemu-system-x86_64 … -object memory-backend-memfd,id=mem,size=1G,share=on -machine q35,memory-backend=mem \
//!   -chardev socket,id=disk,path=/tmp/disk.sock,reconnect=1 -device vhost-user-blk-pci,chardev=disk,num-queues=1
//! disk - 8 | sha256sum                   (the same contents on standard output)
//! ```

use std::error::Error;
use std::io::Write as _;
use std::sync::Arc;

use towline_vhost_user::{
    Address, BackendError, Batch, Cancel, Chain, Device, FrontendSource, Listener, Next, ProtocolFeatures,
    Queues, Worker,
};
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_RO, VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_T_IN,
};

const SECTOR: u64 = 512;
/// Bytes copied at a time.
const PART: usize = 4096;
const BATCH: usize = 16;

struct Disk {
    sectors: u64,
}

struct Reader {
    sectors: u64,
    batch: Batch,
}

impl Device for Disk {
    fn name(&self) -> &str {
        "disk"
    }

    fn queue_count(&self) -> usize {
        1
    }

    fn features(&self) -> u64 {
        1 << VIRTIO_BLK_F_RO
    }

    fn protocol_features(&self) -> ProtocolFeatures {
        ProtocolFeatures::CONFIG
    }

    fn config(&self) -> Vec<u8> {
        self.sectors.to_le_bytes().to_vec()
    }

    fn worker(&self, _: usize) -> Result<Box<dyn Worker>, BackendError> {
        Ok(Box::new(Reader { sectors: self.sectors, batch: Batch::new() }))
    }

    fn migration_version(&self) -> Result<String, BackendError> {
        Ok(format!("disk-1 sectors={}", self.sectors))
    }

    fn accepts(&self, source: &str) -> Result<(), BackendError> {
        let ours = self.migration_version()?;
        if source == ours {
            Ok(())
        } else {
            Err(BackendError::new(format!("it is {source}, this is {ours}")))
        }
    }
}

impl Worker for Reader {
    fn run(&mut self, queues: &mut Queues<'_>) -> Next {
        let Some(ring) = queues.ring(0) else { return Next::Wait };
        let count = ring.pop(&mut self.batch, BATCH);
        for chain in self.batch.chains() {
            let written = serve_request(&chain, self.sectors);
            ring.complete(chain, written);
        }
        if count == BATCH { Next::Again } else { Next::Wait }
    }
}

/// Serves one request. Returns the number of bytes written to the chain.
fn serve_request(chain: &Chain<'_>, sectors: u64) -> u32 {
    let (mut kind, mut sector) = ([0; 4], [0; 8]);
    let whole = chain.read_at(0, &mut kind) == 4 && chain.read_at(8, &mut sector) == 8;
    // The last writable byte is for the status.
    let Some(data_bytes) = chain.writable_bytes().checked_sub(1) else { return 0 };
    let first = u64::from_le_bytes(sector);
    let fits = first
        .checked_mul(SECTOR)
        .is_some_and(|start| u64::from(data_bytes) <= (sectors * SECTOR).saturating_sub(start));
    let status = match u32::from_le_bytes(kind) {
        VIRTIO_BLK_T_IN if whole && fits => {
            for start in (0..data_bytes as usize).step_by(PART) {
                let bytes = contents(first * SECTOR + start as u64, PART.min(data_bytes as usize - start));
                chain.write_at(start, &bytes);
            }
            VIRTIO_BLK_S_OK
        }
        VIRTIO_BLK_T_IN => VIRTIO_BLK_S_IOERR,
        _ => VIRTIO_BLK_S_UNSUPP,
    };
    chain.write_at(data_bytes as usize, &[u8::try_from(status).unwrap_or(1)]);
    data_bytes + 1
}

/// Contents of the disk from `start` on, a multiple of eight.
fn contents(start: u64, len: usize) -> Vec<u8> {
    let hash = |word: u64| {
        let word = (word ^ (word >> 31)).wrapping_mul(0x7fb5_d329_728e_a185);
        (word ^ (word >> 27)).wrapping_mul(0x81da_def4_bc2d_d44d)
    };
    (0..len.div_ceil(8) as u64).flat_map(|word| hash(start / 8 + word + 1).to_le_bytes()).take(len).collect()
}

fn main() -> Result<(), Box<dyn Error>> {
    tracing_subscriber::fmt().with_env_filter(tracing_subscriber::EnvFilter::from_default_env()).init();
    let usage = "usage: disk SOCKET|- MIB";
    let path = std::env::args_os().nth(1).ok_or(usage)?;
    let mib: u64 = std::env::args().nth(2).ok_or(usage)?.parse()?;
    if path == "-" {
        for at in 0..mib {
            std::io::stdout().write_all(&contents(at << 20, 1 << 20))?;
        }
        return Ok(());
    }
    let device: Arc<dyn Device> = Arc::new(Disk { sectors: (mib << 20) / SECTOR });
    let listener = Listener::bind(&Address::Unix(path.into()))?;
    Ok(FrontendSource::Listen(listener).serve(&device, &Cancel::new()?)?)
}
