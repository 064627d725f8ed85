{{/* Names, labels and TCP ports. Each has one definition, here. */}}

{{- define "rlctl.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{ .Values.fullnameOverride }}
{{- else if contains "rlctl" .Release.Name -}}
{{ .Release.Name }}
{{- else -}}
{{ .Release.Name }}-rlctl
{{- end -}}
{{- end -}}

{{- define "rlctl.ports" -}}
coordinator: 5080
commands: 5081
generation: 5082
data: 5083
web: 5090
http: 8080
coordinatorMetrics: 9464
stageMetrics: 9465
gatewayMetrics: 9470
sglang: 30000
vllm: 8000
{{- end -}}

{{/* Labels that select the pods of a component. (dict "root" $ "component" "stage" "name" "actor") */}}
{{- define "rlctl.selector" -}}
app.kubernetes.io/name: rlctl
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- with .name }}
rlctl/{{ eq $.component "stage" | ternary "model" "gateway" }}: {{ . }}
{{- end }}
{{- end -}}

{{- define "rlctl.labels" -}}
{{ include "rlctl.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version | replace "+" "_" }}
{{- with .root.Values.labels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "rlctl.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (.Values.serviceAccount.create | ternary (include "rlctl.fullname" .) "default") }}
{{- end -}}

{{/* (dict "image" IMAGE "tag" "default tag") */}}
{{- define "rlctl.image" -}}
{{- if .image.digest -}}
{{ .image.repository }}@{{ .image.digest }}
{{- else -}}
{{ .image.repository }}:{{ .image.tag | default .tag }}
{{- end -}}
{{- end -}}

{{- define "rlctl.coordinatorSecret" -}}
{{ .Values.tls.coordinatorSecret | default (printf "%s-coordinator-tls" (include "rlctl.fullname" .)) }}
{{- end -}}

{{/* (dict "root" $ "gateway" $gateway) */}}
{{- define "rlctl.gatewaySecret" -}}
{{ .gateway.tlsSecret | default (printf "%s-gateway-%s-tls" (include "rlctl.fullname" .root) .gateway.name) }}
{{- end -}}

{{/* (dict "root" $ "model" $model) */}}
{{- define "rlctl.modelSecret" -}}
{{ .model.tlsSecret | default (printf "%s-%s-tls" (include "rlctl.fullname" .root) .model.name) }}
{{- end -}}
