//! A virtio entropy device: one queue whose buffers are filled from `/dev/urandom`.
//!
//! ```text
//! cargo run -p towline-vhost-user --example rng -- /tmp/rng.sock
//! qemu-system-x86_64 … -object memory-backend-memfd,id=mem,size=1G,share=on -machine q35,memory-backend=mem \
//!   -chardev socket,id=rng,path=/tmp/rng.sock -device vhost-user-rng-pci,chardev=rng
//! ```

use std::error::Error;
use std::fs::File;
use std::io::Read as _;
use std::sync::Arc;

use towline_vhost_user::{
    Address, BackendError, Batch, Cancel, Device, FrontendSource, Listener, Next, Queues, Worker,
};

/// Maximum number of bytes for one request. A driver that needs more sends another.
const BYTES_MAX: usize = 4096;
/// Maximum number of requests in one run.
const BATCH: usize = 64;

struct Rng;

struct Filler {
    source: File,
    batch: Batch,
}

impl Device for Rng {
    fn name(&self) -> &str {
        "rng"
    }

    fn queue_count(&self) -> usize {
        1
    }

    fn features(&self) -> u64 {
        0
    }

    fn worker(&self, _: usize) -> Result<Box<dyn Worker>, BackendError> {
        Ok(Box::new(Filler { source: File::open("/dev/urandom")?, batch: Batch::new() }))
    }
}

impl Worker for Filler {
    fn run(&mut self, queues: &mut Queues<'_>) -> Next {
        let Some(ring) = queues.ring(0) else { return Next::Wait };
        let count = ring.pop(&mut self.batch, BATCH);
        for chain in self.batch.chains() {
            let mut bytes = [0; BYTES_MAX];
            let wanted = BYTES_MAX.min(chain.writable_bytes() as usize);
            let got = self.source.read(&mut bytes[..wanted]).unwrap_or(0);
            let written = chain.write_at(0, &bytes[..got]);
            ring.complete(chain, u32::try_from(written).unwrap_or(0));
        }
        if count == BATCH { Next::Again } else { Next::Wait }
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    tracing_subscriber::fmt().with_env_filter(tracing_subscriber::EnvFilter::from_default_env()).init();
    let device: Arc<dyn Device> = Arc::new(Rng);
    let frontends = match (FrontendSource::from_service_manager()?, std::env::args_os().nth(1)) {
        (Some(socket), _) => socket,
        (None, path) => {
            let path = path.ok_or("usage: rng SOCKET, or as a service with socket activation")?;
            FrontendSource::Listen(Listener::bind(&Address::Unix(path.into()))?)
        }
    };
    Ok(frontends.serve(&device, &Cancel::new()?)?)
}
