//! Reads random bytes from a vhost-user entropy device, as a guest's driver would:
//!
//! ```text
//! cargo run -p towline-vhost-user --example rng -- /tmp/rng.sock
//! cargo run -p towline-frontend --example entropy -- /tmp/rng.sock
//! ```

use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use towline_frontend::wire::feature;
use towline_frontend::{Frontend, MemoryArena, Queue, QueueBuffer, QueueOptions};

/// Number of bytes to read.
const BYTES: u32 = 32;
/// Time limit for the connection and for the reply.
const WITHIN: Duration = Duration::from_secs(5);

fn main() -> Result<(), Box<dyn Error>> {
    let socket = std::env::args_os().nth(1).ok_or("usage: entropy SOCKET")?;
    let mut frontend = Frontend::connect(Path::new(&socket), WITHIN)?;
    let negotiated = frontend.negotiate(feature::VERSION_1, feature::EVENT_IDX, 0)?;

    let memory = Arc::new(MemoryArena::new(1 << 20)?);
    frontend.set_mem_table(Some(&memory))?;
    let mut queue = Queue::new(&memory, 0, QueueOptions { size: 16, features: negotiated.features })?;
    frontend.start(&queue, 0)?;

    let buffer = QueueBuffer { guest: memory.alloc(u64::from(BYTES), 8), len: BYTES };
    queue.add(&[], &[buffer], 0);
    queue.publish();
    queue.wait(WITHIN)?;
    let used = queue.pop_used()?.ok_or("the device has used no buffer")?;
    for byte in memory.bytes(buffer.guest, used.len as usize) {
        print!("{byte:02x}");
    }
    println!();
    frontend.stop(0)?;
    Ok(())
}
