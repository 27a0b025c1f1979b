//! OpenSSH into a guest through its vsock: by `towline vsock connect` as ProxyCommand, and by the names of
//! systemd-ssh-proxy.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use tempfile::TempDir;
use towline_lab::{LinuxGuest, Sshd, Version, require_lab, ssh_key, towline_binary, wait_until};

use crate::support::{CID, WITHIN, device_arguments, linux_with, shell, start_device};

/// The guest's configuration: keys only, and nothing of PAM, which the guest has no files for.
const SSHD: &str = "HostKey /tmp/host_key\nPermitRootLogin prohibit-password\nUsePAM no\nStrictModes no\nUseDNS no\n\
    AuthorizedKeysFile /tmp/authorized_keys\nPidFile none\n";

/// Path of this program in the guest; sshd has to be started by an absolute one.
fn in_guest(program: &Path) -> String {
    format!("/bin/{}", program.file_name().expect("a program has a name").to_string_lossy())
}

/// Writes a file of the guest.
fn write(guest: &mut LinuxGuest, path: &str, content: &str) {
    shell(guest, &format!("printf '{}' > {path}; chmod 600 {path}", content.replace('\n', "\\n")));
}

/// Starts an sshd at the guest's vsock port 22.
fn serve(guest: &mut LinuxGuest, sshd: &Sshd, scratch: &Path) {
    let user = ssh_key(scratch, "user_key").unwrap();
    write(guest, "/tmp/host_key", &std::fs::read_to_string(scratch.join("host_key")).unwrap());
    write(guest, "/tmp/authorized_keys", &user);
    let paths =
        sshd.started().into_iter().map(|(program, option)| format!("{option} {}\n", in_guest(&program)));
    write(guest, "/tmp/sshd_config", &(SSHD.to_owned() + &paths.collect::<String>()));
    shell(guest, "mkdir -p /etc /run/sshd /root");
    shell(
        guest,
        "echo root:x:0:0:root:/root:/bin/sh > /etc/passwd; echo sshd:x:100:100:sshd:/run/sshd:/bin/sh >> /etc/passwd",
    );
    shell(guest, "echo root:x:0: > /etc/group; echo sshd:x:100: >> /etc/group");
    let program = format!("{} -i -f /tmp/sshd_config -E /tmp/sshd_log", in_guest(sshd.path()));
    shell(guest, &format!("socat VSOCK-LISTEN:22,fork EXEC:'{program}' > /tmp/socat_log 2>&1 & echo"));
}

/// Writes the configuration that docs/vsock.md shows, with the keys of this test.
fn configure(scratch: &Path) -> PathBuf {
    let towline = towline_binary().unwrap();
    let (towline, here) = (towline.display(), scratch.display());
    let config = scratch.join("config");
    let text = format!(
        "Host vsock-mux/* vsock-mux%*\n  ProxyCommand {towline} vsock connect --pass-fd %h %p\n  ProxyUseFdpass yes\n  \
         CheckHostIP no\n\
         Host guest\n  ProxyCommand {towline} vsock connect {here}/%h.v %p\n\
         Host *\n  User root\n  IdentityFile {here}/user_key\n  IdentitiesOnly yes\n  HostKeyAlias guest\n  \
         UserKnownHostsFile {here}/known_hosts\n  StrictHostKeyChecking yes\n"
    );
    std::fs::write(&config, text).unwrap();
    let host = ssh_key(scratch, "host_key").unwrap();
    std::fs::write(scratch.join("known_hosts"), format!("guest {host}")).unwrap();
    config
}

/// Runs a command in the guest over ssh.
fn ssh(config: &Path, host: &str, command: &str, input: &[u8]) -> Output {
    let mut ssh = Command::new("ssh");
    ssh.arg("-F").arg(config).args(["-o", "BatchMode=yes", "-o", "ConnectTimeout=60", host, command]);
    let mut child = ssh.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let (mut stdin, input) = (child.stdin.take().unwrap(), input.to_vec());
    // A command that fails does not read its input.
    let writing = std::thread::spawn(move || stdin.write_all(&input).is_ok());
    let output = child.wait_with_output().unwrap();
    writing.join().unwrap();
    output
}

#[test]
fn ssh_reaches_a_guest_as_its_users_expect() {
    let name = "ssh_reaches_a_guest_as_its_users_expect";
    if !require_lab(name) {
        return;
    }
    let Some(sshd) = Sshd::find(name) else { return };
    // ssh converts host names to lower case.
    let directory = format!("towline-lab-ssh-{}", std::process::id());
    let scratch: TempDir = tempfile::Builder::new().prefix(&directory).rand_bytes(0).tempdir().unwrap();
    let path = |name: &str| scratch.path().join(name);
    let config = configure(scratch.path());
    let (socket, uds) = (path("device"), path("guest.v"));
    let (socket_path, uds_path, cid) =
        (socket.display().to_string(), uds.display().to_string(), CID.to_string());
    let mut device = start_device(&["--socket", &socket_path, "--cid", &cid, "--uds", &uds_path], &socket);
    let started = sshd.started();
    let programs = [Path::new("/usr/bin/socat"), sshd.path()].into_iter();
    let programs: Vec<&Path> = programs.chain(started.iter().map(|(program, _)| program.as_path())).collect();
    let (_qemu, mut guest) =
        linux_with(Version::V10_0, &programs).args(device_arguments(&socket)).boot(WITHIN).unwrap();
    serve(&mut guest, &sshd, scratch.path());
    let log = |guest: &mut LinuxGuest| shell(guest, "touch /tmp/sshd_log; cat /tmp/socat_log /tmp/sshd_log");
    // The exit status of the remote command is that of ssh.
    let answered = wait_until("an sshd in the guest", WITHIN, || {
        let output = ssh(&config, "guest", "echo $SSH_CONNECTION; exit 7", b"");
        Ok((output.status.code() != Some(255)).then_some(output))
    });
    let answered = answered.unwrap_or_else(|error| panic!("{error:#}: {}", log(&mut guest)));
    assert_eq!(answered.status.code(), Some(7), "{answered:?}: {}", log(&mut guest));
    // Bytes there and back, and both ends of the stream, by both ways.
    let mut content = vec![0; 1 << 20];
    fastrand::Rng::with_seed(7).fill(&mut content);
    for host in ["guest".to_owned(), format!("vsock-mux{uds_path}"), format!("vsock-mux/{uds_path}")] {
        let output = ssh(&config, &host, "cat", &content);
        assert!(output.status.success(), "{host}: {}", String::from_utf8_lossy(&output.stderr));
        assert!(output.stdout == content, "{host}: {} bytes came back", output.stdout.len());
    }
    // A port without a listener: the reason is printed, and ssh fails as for any host.
    let refused =
        Command::new("ssh").arg("-F").arg(&config).args(["-p", "23", "guest", "true"]).output().unwrap();
    let text = String::from_utf8_lossy(&refused.stderr);
    assert!(text.contains(&format!("port 23 of the guest at {uds_path} refused the connection")), "{text}");
    assert_eq!(refused.status.code(), Some(255));
    assert!(device.runs().unwrap());
}
