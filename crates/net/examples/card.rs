//! A network card on a tap, without the options, metrics and sandbox of `towline net`.
//!
//! ```text
//! ip tuntap add dev vm0 mode tap vnet_hdr && ip link set vm0 up
//! cargo run -p towline-net --example card -- vm0 /tmp/net.sock
//! qemu-system-x86_64 … -object memory-backend-memfd,id=mem,size=1G,share=on -machine q35,memory-backend=mem \
//!   -chardev socket,id=net,path=/tmp/net.sock -netdev vhost-user,id=net,chardev=net -device virtio-net-pci,netdev=net
//! ```

use std::error::Error;
use std::sync::Arc;

use towline_net::{Net, Options, Taps};
use towline_vhost_user::{Address, Cancel, Device, FrontendSource, Listener};

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let (Some(tap), Some(socket)) = (arguments.next(), arguments.next()) else {
        return Err("usage: card TAP SOCKET".into());
    };
    let card = Arc::new(Net::new(Taps::open(&tap, 1)?, Options::default()));
    let device: Arc<dyn Device> = Arc::clone(&card) as _;
    let listener = Listener::bind(&Address::Unix(socket.into()))?;
    // A frontend that disconnects may connect again; the loop ends with an error of the socket.
    FrontendSource::Listen(listener).serve(&device, &Cancel::new()?)?;
    for (index, [receive, transmit]) in card.statistics().iter().enumerate() {
        println!("queue pair {index}: {} packets received, {} sent", receive.packets, transmit.packets);
    }
    Ok(())
}
