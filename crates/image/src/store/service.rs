//! Opens a store: selects the service and its credentials.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use object_store::aws::AmazonS3Builder;
use object_store::azure::MicrosoftAzureBuilder;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::http::HttpBuilder;
use object_store::local::LocalFileSystem;
use object_store::{BackoffConfig, ClientOptions, ObjectStore, RetryConfig};

use super::connector::Connector;
use super::credentials::Profile;
use super::lease_state::LeaseGuard;
use super::{Error, RETRIES_MAX, RETRY_TIMEOUT, Result};
use crate::location::{Location, Scheme};

/// Variables of S3 endpoints, the first of those that are set counts, and the variable that permits
/// `http://`.
const S3_ENDPOINTS: [&str; 3] = ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"];
const S3_PERMISSION: &str = "AWS_ALLOW_HTTP";

/// Opens the objects of a prefix. Modifying requests are checked with `guard`.
pub(super) fn open(prefix: &Location, guard: &LeaseGuard) -> Result<Arc<dyn ObjectStore>> {
    let retry = RetryConfig {
        backoff: BackoffConfig { max_backoff: Duration::from_secs(5), ..BackoffConfig::default() },
        max_retries: RETRIES_MAX,
        retry_timeout: RETRY_TIMEOUT,
    };
    let failed = |error| Error::store("cannot be used", prefix.to_string())(error);
    let bucket = prefix.authority();
    let connector = || Connector::new(guard.clone());
    Ok(match prefix.scheme() {
        Scheme::S3 => {
            let variable = |name: &str| std::env::var(name).ok();
            check_encryption(prefix, &S3_ENDPOINTS, S3_PERMISSION, &variable)?;
            let profile = Profile::load()?;
            let mut builder = AmazonS3Builder::from_env().with_bucket_name(bucket);
            let is_set = |name: &str| std::env::var_os(name).is_some();
            if let (false, Some(id), Some(secret)) =
                (is_set("AWS_ACCESS_KEY_ID"), profile.key_id, profile.secret)
            {
                builder = builder.with_access_key_id(id).with_secret_access_key(secret);
                if let Some(token) = profile.token {
                    builder = builder.with_token(token);
                }
            }
            if let (false, false, Some(region)) =
                (is_set("AWS_REGION"), is_set("AWS_DEFAULT_REGION"), profile.region)
            {
                builder = builder.with_region(region);
            }
            Arc::new(builder.with_retry(retry).with_http_connector(connector()).build().map_err(failed)?)
        }
        Scheme::Google => {
            let builder = GoogleCloudStorageBuilder::from_env().with_bucket_name(bucket);
            Arc::new(builder.with_retry(retry).with_http_connector(connector()).build().map_err(failed)?)
        }
        Scheme::Azure => {
            let builder = MicrosoftAzureBuilder::from_env().with_container_name(bucket);
            Arc::new(builder.with_retry(retry).with_http_connector(connector()).build().map_err(failed)?)
        }
        Scheme::Http | Scheme::Https => {
            let is_http = prefix.scheme() == Scheme::Http;
            let options = ClientOptions::new().with_allow_http(is_http);
            let url = format!("{}://{bucket}", if is_http { "http" } else { "https" });
            let builder = HttpBuilder::new().with_url(url).with_client_options(options);
            Arc::new(builder.with_retry(retry).with_http_connector(connector()).build().map_err(failed)?)
        }
        Scheme::Directory => {
            let directory = prefix.directory();
            let store = |source: io::Error| {
                let object = directory.display().to_string();
                let source = object_store::Error::Generic { store: "directory", source: Box::new(source) };
                Error::store("cannot be used", object)(source)
            };
            std::fs::create_dir_all(&directory).map_err(store)?;
            let local = LocalFileSystem::new_with_prefix(&directory).map_err(failed)?;
            Arc::new(local.with_fsync(true))
        }
    })
}

/// Refuses an endpoint without TLS at once: requests would fail without a reason, after all retries.
fn check_encryption(
    prefix: &Location,
    endpoints: &[&'static str],
    permission: &'static str,
    variable: &dyn Fn(&str) -> Option<String>,
) -> Result<()> {
    let set = endpoints.iter().find_map(|name| variable(name).map(|address| (*name, address)));
    let Some((name, address)) = set else { return Ok(()) };
    let is_plain = address.to_ascii_lowercase().starts_with("http://");
    let is_permitted = variable(permission)
        .is_some_and(|value| ["1", "true", "on", "yes", "y"].contains(&value.to_ascii_lowercase().as_str()));
    if is_plain && !is_permitted {
        Err(Error::Unencrypted { prefix: prefix.to_string(), variable: name, permission })
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    #[test]
    fn an_endpoint_without_tls_has_to_be_permitted() {
        let prefix: Location = "s3://bucket/vm".parse().unwrap();
        let check = |variables: &[(&str, &str)]| {
            let variable = |name: &str| {
                variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
            };
            check_encryption(&prefix, &S3_ENDPOINTS, S3_PERMISSION, &variable)
        };
        let plain = ("AWS_ENDPOINT_URL", "http://minio:9000");
        assert!(check(&[]).is_ok() && check(&[("AWS_ENDPOINT_URL", "https://minio:9000")]).is_ok());
        assert!(check(&[plain, ("AWS_ALLOW_HTTP", "true")]).is_ok());
        assert!(check(&[plain, ("AWS_ENDPOINT_URL_S3", "https://minio:9000")]).is_ok());
        assert_eq!(
            check(&[plain]).unwrap_err().to_string(),
            "s3://bucket/vm: AWS_ENDPOINT_URL is an http:// address, where credentials and memory are not encrypted: \
             use https://, or set AWS_ALLOW_HTTP=true to permit it"
        );
        assert!(check(&[plain, ("AWS_ALLOW_HTTP", "false")]).is_err());
    }
}
