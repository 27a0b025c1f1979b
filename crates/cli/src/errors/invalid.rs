//! Texts of requests that are not possible, with the options that make them so.

use towline_control::plan::{CopiedPages, Invalid, InvalidEnds, InvalidPostcopy, InvalidTls, RequestedPages};

const ONE_LANE: &str = "give both ends the same --multifd-channels, at least 1";

/// Formats a refused request.
pub(super) fn text(invalid: &Invalid) -> String {
    match invalid {
        Invalid::LanesOver { lanes, address } => format!(
            "--multifd-channels {lanes} with {address}: only tcp:, unix:, ws:// and wss:// have several connections; leave the option out"
        ),
        Invalid::TooManyLanes { lanes, lanes_max } => {
            format!("--multifd-channels {lanes}: at most {lanes_max}, as in QEMU")
        }
        Invalid::Ends(invalid) => ends(invalid),
        Invalid::Postcopy(invalid) => postcopy(invalid),
        Invalid::Tls(invalid) => tls(invalid),
        Invalid::ZeroCopy(copied) => zero_copy(copied),
        Invalid::CompressionBetweenImages { method } => format!(
            "--compression {method} between two images, neither of which is a stream: leave the option out"
        ),
        Invalid::CompressionWithoutLanes { method } => format!(
            "--compression {method} with 0 lanes: only lanes are compressed, the main channel never is; {ONE_LANE}"
        ),
        Invalid::RunningWithoutReturnPath => {
            "--return-path off with a running guest: QEMU would end it although its arrival is not acknowledged".into()
        }
        Invalid::WithoutReturnPath => {
            "--return-path off is for a stream from an image to fd:, exec:, tcp: or unix:, or from one of these to an image; elsewhere go by way of an image".into()
        }
        Invalid::FileTo { path, destination } => {
            let file = path.display();
            format!(
                "{file}: a file of `virsh save` goes by way of an image: `towline copy {file} IMAGE`, then `towline copy --run IMAGE {destination}`"
            )
        }
        Invalid::SeveralDestinations => {
            "several destinations, but only an image can be read several times: copy the guest to an image first, and the image to all of them".into()
        }
        Invalid::TooManyDestinations { found, expected } => {
            format!("{found} destinations, at most {expected} at once")
        }
        Invalid::NamedTwice { destination } => format!("{destination} is named twice, and takes one guest"),
        Invalid::DirectEnds => {
            "a guest goes directly between a QEMU here and one of another host only: qmp: and ssh:HOST".into()
        }
        Invalid::InspectedWithoutStream => "only a stream can be inspected".into(),
        Invalid::WithoutStores { location } => format!(
            "{location}: this towline was built without object stores (feature `store`); use one that has them"
        ),
    }
}

fn ends(invalid: &InvalidEnds) -> String {
    let text = match invalid {
        InvalidEnds::SameQemu { socket } => {
            return format!(
                "qmp:{}: SOURCE and DEST are the same QEMU; DEST is another one, started with `-incoming defer`",
                socket.display()
            );
        }
        InvalidEnds::ResumedTo { address } => {
            return format!(
                "--resume with {address}, which may run the guest by itself: the same guest would run twice"
            );
        }
        InvalidEnds::EndedToProcess { destination } => {
            return format!(
                "{destination} is gone with this process, so its source is not ended: copy to it"
            );
        }
        InvalidEnds::ImageToNull => "null: takes a stream; to check an image, `inspect --verify` it",
        InvalidEnds::ThrottledWithoutQemu => {
            "--throttle is for a qmp: source, whose QEMU slows its guest down: set auto-converge on at the QEMU that sends"
        }
        InvalidEnds::EndedWithoutQemu => "only a qmp: source can be ended: copy this one",
        InvalidEnds::EndedToNull => "null: keeps nothing, so its source is not ended: copy to it",
        InvalidEnds::DetachedWithoutQemu => {
            "--detach-vsock needs a qmp: destination, where the device is attached again"
        }
        InvalidEnds::BaseWithoutImage => "--base is for an image that is to be stored: name one as DEST",
        InvalidEnds::Snapshot => "--live takes an image of a guest that runs on: from qmp: to an image",
    };
    text.into()
}

fn postcopy(invalid: &InvalidPostcopy) -> String {
    let text = match invalid {
        InvalidPostcopy::To { destination } => {
            return format!("--postcopy to {destination}: it cannot run a guest");
        }
        InvalidPostcopy::LanesOfQemu { version, socket } => {
            return format!(
                "--multifd-channels with --postcopy: QEMU {version} on {socket} has no lanes beside postcopy, which came with 10.1: leave the option out"
            );
        }
        InvalidPostcopy::OfQemu => {
            "--postcopy of a running guest is between two qmp: QEMUs, which do it themselves; an image goes to tcp: and unix: too"
        }
        InvalidPostcopy::OfStream => {
            "--postcopy with a stream as its source: its sender decides; set postcopy-ram at both QEMUs and connect them without towline"
        }
        InvalidPostcopy::WithoutGuest => {
            "--postcopy is for a destination that runs the guest: qmp:, tcp: or unix: with a QEMU behind it"
        }
        InvalidPostcopy::RecoveryOfQemu => {
            "--recover is for the guest of an image: two QEMUs that lost each other have `migrate-recover` and `migrate` with resume"
        }
        InvalidPostcopy::LanesOfImage => {
            "--multifd-channels with --postcopy: the guest of an image runs before its memory is sent, and no QEMU receives pages on lanes once it runs; leave it out"
        }
        InvalidPostcopy::Compressed => {
            "--compression applies to lanes, and --postcopy has none: leave it out"
        }
        InvalidPostcopy::ZeroCopy => {
            "--zero-copy-send on applies to lanes, and --postcopy has none: leave it out"
        }
        InvalidPostcopy::WithoutReturnPath => {
            "--postcopy needs the return path, on which pages are requested"
        }
        InvalidPostcopy::OtherChannel { expected: RequestedPages::PreemptChannel } => {
            "the guest was started with a preempt channel: pass --postcopy-preempt"
        }
        InvalidPostcopy::OtherChannel { expected: RequestedPages::MainChannel } => {
            "the guest was started with no preempt channel: leave --postcopy-preempt out"
        }
    };
    text.into()
}

fn tls(invalid: &InvalidTls) -> String {
    match invalid {
        InvalidTls::Missing { address } => {
            format!("{address} needs --tls-creds DIR; ws:// is the one without TLS")
        }
        InvalidTls::WithoutStream => {
            "--tls-creds is for a stream (tcp:, unix:), and neither end is one: between a qmp: QEMU and towline there is a private Unix socket, which needs none; leave the option out".into()
        }
        InvalidTls::Over { address } => {
            format!("--tls-creds with {address}: only tcp:, unix: and wss:// support TLS; leave the option out")
        }
        InvalidTls::NameWithoutDestination => {
            "--tls-hostname is the name of a destination that is connected to (tcp:, unix:), and there is none here: leave the option out".into()
        }
        InvalidTls::NameMissing { address } => format!(
            "--tls-creds with {address}, which has no host name: give that of its certificate with --tls-hostname"
        ),
    }
}

fn zero_copy(copied: &CopiedPages) -> String {
    let why = match copied {
        CopiedPages::NotTcp { address } => {
            format!("{address} is not a TCP connection, and the kernel supports it for TCP only")
        }
        CopiedPages::UnixSocket => {
            "the stream to a qmp: DEST goes through a Unix socket on this host, where the kernel always copies".into()
        }
        CopiedPages::NothingSent => "nothing is sent to DEST".into(),
        CopiedPages::WithoutLanes => format!("only lanes have it; {ONE_LANE}"),
        CopiedPages::Compressed { method } => {
            format!("--compression {method} copies every page; leave one of the two out")
        }
        CopiedPages::Encrypted => "--tls-creds encrypts a copy of every page; leave one of the two out".into(),
    };
    format!("--zero-copy-send on: {why}; `auto` goes without where it must")
}
