//! A vsock device whose guest reaches Unix sockets of the host, and is reached through one.
//!
//! ```text
//! cargo run -p towline-vsock --example device -- 3 /tmp/vsock.sock /tmp/guest3
//! qemu-system-x86_64 … -object memory-backend-memfd,id=mem,size=1G,share=on -machine q35,memory-backend=mem \
//!   -chardev socket,id=vsock,path=/tmp/vsock.sock -device vhost-user-vsock-pci,chardev=vsock
//! ```
//! A guest that connects to port 1024 of CID 2 reaches the host's socket /tmp/guest3_1024. A client of the
//! host that connects to /tmp/guest3 and sends `CONNECT 22` reaches the guest's port 22.

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use towline_vhost_user::{Address, Cancel, Device, FrontendSource, Listener};
use towline_vsock::{ConnectionLimits, LocalGuests, Settings, Vsock, guest_cid};

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [cid, socket, uds] = &arguments[..] else { return Err("usage: device CID SOCKET UDS".into()) };
    let settings = Settings {
        cid: guest_cid(cid)?,
        uds: Some(uds.into()),
        uds_seqpacket: None,
        rules: Vec::new(),
        groups: Vec::new(),
        limits: ConnectionLimits::default(),
        busy_poll: Duration::ZERO,
    };
    let device: Arc<dyn Device> = Arc::new(Vsock::new(settings, &Arc::new(LocalGuests::default()))?);
    let listener = Listener::bind(&Address::Unix(socket.into()))?;
    Ok(FrontendSource::Listen(listener).serve(&device, &Cancel::new()?)?)
}
