//! Processes of the contenders.

use std::path::Path;

use anyhow::{Result, bail};
use towline_lab::Towline as Process;

use super::hosts::{INSIDE, OUTSIDE, PORT, TAP};
use super::rows::{Carrier, Hosts, PASST, TESTPMD, VHOST_USER_NET};

/// Name of the frontend's socket.
pub(super) const SOCKET: &str = "net.sock";

impl Hosts<'_> {
    /// Starts the backend in the outer namespace, with its socket in this directory.
    pub(super) fn backend(&self, directory: &Path) -> Result<Process> {
        let (socket, queues) = (directory.join(SOCKET).display().to_string(), self.run.row.queues);
        let own = |options: &str| {
            let line = format!("net --socket {socket} --tap {TAP} --queues {queues} {options}");
            anyhow::Ok((self.bench.options.towline.clone(), line))
        };
        let (program, line) = match self.run.contender.kind {
            Carrier::Towline => own(""),
            Carrier::Sleeping => own("--poll-us 0"),
            Carrier::VhostUserNet => Ok((
                self.bench.peer(VHOST_USER_NET)?,
                format!(
                    "--net-backend ip={OUTSIDE},mask=255.255.255.0,socket={socket},client=off,num_queues={},queue_size=256,tap={TAP}",
                    2 * queues
                ),
            )),
            // Without huge pages, between its vhost and its tap driver.
            Carrier::Testpmd => Ok((
                self.bench.peer(TESTPMD)?,
                format!(
                    "-l 0,1 --no-huge -m 1024 --no-pci --no-shconf --no-telemetry --log-level error \
                 --vdev net_vhost0,iface={socket},queues={queues},client=0 --vdev net_tap0,iface={TAP} -- \
                 --forward-mode io --auto-start --stats-period 3600 --rxq {queues} --txq {queues}"
                ),
            )),
            // For a guest at `INSIDE`, which reaches `OUTSIDE` as it is.
            Carrier::Passt => Ok((
                self.bench.peer(PASST)?,
                format!(
                    "--vhost-user --socket {socket} --foreground --quiet --ipv4-only --interface {TAP} --address {INSIDE} \
                 --netmask 24 --gateway {OUTSIDE} --map-host-loopback none --no-dhcp --udp-ports none \
                 --tcp-ports {INSIDE}/{PORT}"
                ),
            )),
            Carrier::Loop | Carrier::Tap | Carrier::Veth => bail!("the limit has no backend"),
        }?;
        Process::start_within(&self.outside.prefix(), &program, line.split_whitespace())
    }
}
