{{/* Rules between values, which values.schema.json cannot express. Each message names the value. */}}

{{- define "rlctl.validate" -}}
{{- $fullname := include "rlctl.fullname" . -}}
{{- if not (or .Values.token.secret .Values.tls.enabled) -}}
{{- fail "token.secret: is empty while tls.enabled is false; a server that other hosts reach needs a token or certificates" -}}
{{- end -}}
{{- if and .Values.tls.certManager.enabled (not .Values.tls.enabled) -}}
{{- fail "tls.certManager.enabled: is true while tls.enabled is false" -}}
{{- end -}}
{{- if and .Values.tls.certManager.enabled (not .Values.tls.certManager.issuer.name) -}}
{{- fail "tls.certManager.issuer.name: is empty; name an Issuer or ClusterIssuer of cert-manager" -}}
{{- end -}}
{{- if and .Values.serviceMonitor.enabled (not .Values.metrics.enabled) -}}
{{- fail "serviceMonitor.enabled: is true while metrics.enabled is false; there is nothing to read" -}}
{{- end -}}
{{- range $list := list "models" "gateways" -}}
{{- $names := dict -}}
{{- range $index, $each := index $.Values $list -}}
{{- if hasKey $names $each.name -}}
{{- fail (printf "%s.%d.name: %q is the name of an earlier entry" $list $index $each.name) -}}
{{- end -}}
{{- $_ := set $names $each.name true -}}
{{- end -}}
{{- end -}}
{{- range $index, $model := .Values.models -}}
{{- $at := printf "models.%d" $index -}}
{{- if or (eq $model.name "coordinator") (hasPrefix "gateway-" $model.name) -}}
{{- fail (printf "%s.name: %q is the name of another object of the chart" $at $model.name) -}}
{{- end -}}
{{- /* A StatefulSet writes its name and a hash into a label, which has 63 characters at most. */ -}}
{{- if gt (len (printf "%s-%s" $fullname $model.name)) 52 -}}
{{- fail (printf "%s.name: \"%s-%s\" is longer than 52 characters; shorten it or fullnameOverride" $at $fullname $model.name) -}}
{{- end -}}
{{- if not (hasPrefix (printf "%s/" $model.checkpoint.mountPath) (printf "%s/" $model.checkpoint.path)) -}}
{{- fail (printf "%s.checkpoint.path: %q is not below checkpoint.mountPath %q" $at $model.checkpoint.path $model.checkpoint.mountPath) -}}
{{- end -}}
{{- if eq $model.engine "torch" -}}
{{- if gt (int $model.tensorParallel) 1 -}}
{{- fail (printf "%s.tensorParallel: an engine of torch has one rank in this chart" $at) -}}
{{- end -}}
{{- range list "engineArgs" "image" "stageResources" -}}
{{- if index $model . -}}
{{- fail (printf "%s.%s: torch has no container of its own" $at .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
